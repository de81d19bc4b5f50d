/* What this build is called. */
#ifndef MK_VERSION_H
#define MK_VERSION_H

#define MK_VERSION "0.1.0"

const char *mk_build(void); /* "mkd 0.1.0 (0123456789ab)": version and commit, "-dirty" when the tree had changes */

#endif
