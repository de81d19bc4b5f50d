/* The fields of rotary position embeddings, in both spellings, and the frequencies they mean: see host/arch.h. Formulas and their order of
 * operations in float32: transformers 5.17, modeling_rope_utils.py (YaRN: arXiv 2309.00071). */
#include <math.h>
#include <string.h>

#include "host/arch.h"

static const double tau = 6.283185307179586;

static double mscale(double factor, double m)
{
    return factor <= 1 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

/* The dimension that turns `rotations` times over `positions`. */
static double turns(double rotations, double dim, double theta, double positions)
{
    return dim * log(positions / (rotations * tau)) / (2 * log(theta));
}

static void plain(mk_rope *r)
{
    for (uint32_t i = 0; i < r->dim / 2; i++) r->inv_freq[i] = 1.0f / (float)pow(r->theta, (double)((float)(2 * i) / (float)r->dim));
}

static void read_yarn(mk_cfg *s, mk_rope *r)
{
    double factor = mk_cfg_num(s, "factor", 1, 1e6), fast = mk_cfg_num_or(s, "beta_fast", 0, 1e6, 32), slow = mk_cfg_num_or(s, "beta_slow", 0, 1e6, 1);
    double m = mk_cfg_num_or(s, "mscale", 0, 100, 0), all = mk_cfg_num_or(s, "mscale_all_dim", 0, 100, 0);
    double given = mk_cfg_num_or(s, "attention_factor", 1e-6, 1e6, 0);
    double original = mk_cfg_int(s, "original_max_position_embeddings", 1, 1u << 30);
    int truncate = mk_cfg_bool_or(s, "truncate", 1);
    if (s->rc) return;
    r->attention = given > 0 ? given : m > 0 && all > 0 ? mscale(factor, m) / mscale(factor, all) : mscale(factor, 1);
    if (all > 0) r->mscale = mscale(factor, all);
    double low = turns(fast > 0 ? fast : 32, r->dim, r->theta, original), high = turns(slow > 0 ? slow : 1, r->dim, r->theta, original);
    if (truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0);
    high = fmin(high, r->dim - 1);
    if (!(low < high || low > high)) high += 0.001;
    for (uint32_t i = 0; i < r->dim / 2; i++) {
        float freq = (float)pow(r->theta, (double)((float)(2 * i) / (float)r->dim));
        float ramp = ((float)i - (float)low) / (float)(high - low), keep = 1.0f - fminf(fmaxf(ramp, 0), 1);
        r->inv_freq[i] = 1.0f / ((float)factor * freq) * (1.0f - keep) + 1.0f / freq * keep;
    }
}

/* Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended. */
static void read_llama3(mk_cfg *s, mk_rope *r)
{
    double factor = mk_cfg_num(s, "factor", 1, 1e6), low = mk_cfg_num(s, "low_freq_factor", 1e-6, 1e6), high = mk_cfg_num(s, "high_freq_factor", 1e-6, 1e6);
    double original = mk_cfg_int(s, "original_max_position_embeddings", 1, 1u << 30);
    if (!s->rc && low >= high) mk_cfg_fail(s, "high_freq_factor", "is %g, expected more than low_freq_factor (%g)", high, low);
    if (s->rc) return;
    plain(r);
    for (uint32_t i = 0; i < r->dim / 2; i++) {
        float f = r->inv_freq[i], wave = (float)tau / f;
        if (wave > (float)(original / low)) {
            r->inv_freq[i] = f / (float)factor;
        } else if (wave >= (float)(original / high)) {
            float smooth = ((float)original / wave - (float)low) / (float)(high - low);
            r->inv_freq[i] = (1.0f - smooth) * f / (float)factor + smooth * f;
        }
    }
}

/* A part of the head's dimensions turns: the field, here or among the rope parameters; `absent` in neither. */
static double read_part(mk_cfg *c, mk_cfg *s, double absent)
{
    double a = mk_cfg_num_or(c, "partial_rotary_factor", 0, 1, -1), b = s ? mk_cfg_num_or(s, "partial_rotary_factor", 0, 1, -1) : -1;
    if (!c->rc && (!s || !s->rc) && a >= 0 && b >= 0 && (a < b || a > b)) mk_cfg_fail(c, "partial_rotary_factor", "is %g, in rope_parameters it is %g", a, b);
    return b >= 0 ? b : a >= 0 ? a : absent;
}

/* The object that holds the fields, if there is one, opened as s; theta, here or there. */
static int begin(mk_cfg *c, mk_cfg *s, mk_rope *r)
{
    memset(r, 0, sizeof *r);
    r->attention = r->mscale = 1;
    double theta = mk_cfg_num_or(c, "rope_theta", 1.0001, 1e12, 0);
    int have = mk_cfg_object(c, "rope_parameters", s);
    if (have && json_is_object(json_object_get(c->obj, "rope_scaling"))) mk_cfg_fail(c, "rope_parameters", "and rope_scaling: expected one of them");
    if (!have) have = mk_cfg_object(c, "rope_scaling", s);
    r->theta = have ? mk_cfg_num_or(s, "rope_theta", 1.0001, 1e12, theta) : theta;
    if (have && !s->rc && theta > 0 && (r->theta < theta || r->theta > theta)) mk_cfg_fail(s, "rope_theta", "is %g, outside it is %g", r->theta, theta);
    if (!c->rc && (!have || !s->rc) && r->theta <= 0) mk_cfg_fail(have ? s : c, "rope_theta", "is missing");
    return have;
}

static int type_is(const mk_cfg *s, const char *name)
{
    const json_t *type = json_object_get(s->obj, "rope_type");
    if (!type || json_is_null(type)) type = json_object_get(s->obj, "type");
    return json_is_string(type) && !strcmp(json_string_value(type), name);
}

void mk_cfg_rope_head(mk_cfg *c, uint32_t dim, double part, mk_rope *r)
{
    mk_cfg s;
    int have = begin(c, &s, r), llama3 = have && type_is(&s, "llama3");
    part = read_part(c, have ? &s : NULL, part);
    r->dim = (uint32_t)(dim * part);
    if (!c->rc && (!have || !s.rc) && (!r->dim || r->dim % 2 || r->dim / 2 > sizeof r->inv_freq / sizeof *r->inv_freq))
        mk_cfg_fail(c, "partial_rotary_factor", "is %g of %u dimensions, expected an even number of them up to 256", part, dim);
    if (have) {
        mk_cfg_expect(&s, "rope_type|type", "\"default\"|\"llama3\"");
        mk_cfg_ignore(&s, "mrope_section|mrope_interleaved"); /* text: the three positions of a token are equal */
        if (llama3 && !c->rc) read_llama3(&s, r);
        mk_cfg_done(&s, c);
    }
    if (!c->rc && !llama3) plain(r);
}

void mk_cfg_rope(mk_cfg *c, uint32_t dim, mk_rope *r)
{
    mk_cfg s;
    if (dim / 2 > sizeof r->inv_freq / sizeof *r->inv_freq) mk_cfg_fail(c, "rope_theta", "turns %u dimensions, supported: 256", dim);
    mk_cfg_expect(c, "partial_rotary_factor", "1.0");
    int have = begin(c, &s, r), yarn = have && type_is(&s, "yarn");
    r->dim = dim;
    if (have) {
        mk_cfg_expect(&s, "partial_rotary_factor", "1.0");
        mk_cfg_expect(&s, "rope_type|type", "\"default\"|\"yarn\"");
        if (yarn) read_yarn(&s, r);
        mk_cfg_done(&s, c);
    }
    if (!c->rc && !yarn) plain(r);
}
