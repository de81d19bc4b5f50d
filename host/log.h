/* Log lines on stderr: one line a message, one write(2) a line, so that lines of several threads never mix. */
#ifndef MK_LOG_H
#define MK_LOG_H

enum mk_log_level { MK_LOG_ERROR = 0, MK_LOG_WARN = 1, MK_LOG_INFO = 2, MK_LOG_DEBUG = 3 };

/* Call once, before other threads log. Messages above `level` are dropped. `time`: put the local time in front of every line (leave it
 * off under a supervisor that stamps lines itself). Before this call: MK_LOG_INFO, no time. */
void mk_log_init(enum mk_log_level level, int time);
enum mk_log_level mk_log_level_now(void);

/* "mkd: info: <message>". Control characters, newlines included, become spaces; a line longer than 2,000 bytes is cut. Any thread. */
void mk_log(enum mk_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
