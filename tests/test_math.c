/* mk_math.h against libm in double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include <math.h>

#include "instructions/mk_math.h"

/* |got - want| in units of the last place of a float at want. */
static double ulps(float got, double want)
{
    float w = (float)want;
    if (isinf(w) || w == 0.0f) return got == w ? 0.0 : 1e9;
    double unit = fmax((double)nextafterf(fabsf(w), INFINITY) - fabs((double)w), 0x1p-149);
    return fabs((double)got - want) / unit;
}

static double worst;
static void see(float got, double want, float x, const char *what, double limit)
{
    double u = ulps(got, want);
    if (!(u <= limit)) {
        fail_msg("%s(%.9g) = %.9g, want %.12g: %.2f ulp", what, (double)x, (double)got, want, u);
    }
    if (u > worst) worst = u;
}
static void say(const char *what)
{
    print_message("%-10s worst %.3f ulp\n", what, worst);
    worst = 0;
}

/* Every `stride`-th float in [lo, hi]. */
#define EACH_FLOAT(x, lo, hi, stride)                                                                                  \
    for (double x##_d = (lo), x##_s = ((double)(hi) - (lo)) / (stride); x##_d <= (hi); x##_d += x##_s)

static void test_exp(void **state)
{
    (void)state;
    EACH_FLOAT(x, -103.0, 88.7, 2e6)
    {
        float x = (float)x_d;
        see(mk_expf(x), exp((double)x), x, "exp", 1.5);
    }
    for (float x = 1e-30f; x < 1.0f; x *= 1.001f) {
        see(mk_expf(x), exp((double)x), x, "exp", 1.5);
        see(mk_expf(-x), exp(-(double)x), -x, "exp", 1.5);
    }
    say("exp");
    assert_true(mk_expf(0.0f) == 1.0f);
    assert_true(mk_expf(-INFINITY) == 0.0f);
    assert_true(mk_expf(-1e30f) == 0.0f);
    assert_true(isinf(mk_expf(89.0f)) && isinf(mk_expf(INFINITY)) && isinf(mk_expf(1e38f)));
    assert_true(isnan(mk_expf(NAN)));
}

static void test_log(void **state)
{
    (void)state;
    for (float x = 1e-44f; x < 3e38f; x = fmaxf(x * 1.0001f, nextafterf(x, INFINITY)))
        see(mk_logf(x), log((double)x), x, "log", 1.5);
    EACH_FLOAT(x, 0.5, 2.0, 2e6)
    {
        float x = (float)x_d;
        see(mk_logf(x), log((double)x), x, "log", 1.5);
    }
    say("log");
    assert_true(mk_logf(1.0f) == 0.0f);
    assert_true(mk_logf(0.0f) == -INFINITY);
    assert_true(mk_logf(INFINITY) == INFINITY);
    assert_true(isnan(mk_logf(-1.0f)) && isnan(mk_logf(NAN)));
    for (float x = 1e-38f; x < 1e30f; x *= 1.0003f) see(mk_log1pf(x), log1p((double)x), x, "log1p", 1.5);
    say("log1p");
    assert_true(mk_log1pf(0.0f) == 0.0f && mk_log1pf(INFINITY) == INFINITY && isnan(mk_log1pf(NAN)));
    assert_true(isnan(mk_logf(-INFINITY)) && mk_logf(-0.0f) == -INFINITY);
}

static void test_gates(void **state)
{
    (void)state;
    EACH_FLOAT(x, -80.0, 80.0, 1e6)
    {
        float x = (float)x_d;
        double d = (double)x;
        see(mk_sigmoidf(x), 1.0 / (1.0 + exp(-d)), x, "sigmoid", 3.0);
    }
    say("sigmoid");
    EACH_FLOAT(x, -80.0, 80.0, 1e6)
    {
        float x = (float)x_d;
        double d = (double)x;
        see(mk_siluf(x), d / (1.0 + exp(-d)), x, "silu", 3.0);
    }
    say("silu");
    EACH_FLOAT(x, -80.0, 60.0, 1e6)
    {
        float x = (float)x_d;
        double d = (double)x;
        see(mk_softplusf(x), x > 20.0f ? d : log1p(exp(d)), x, "softplus", 3.0);
    }
    say("softplus");
    assert_true(mk_softplusf(INFINITY) == INFINITY && mk_softplusf(-INFINITY) == 0.0f && isnan(mk_softplusf(NAN)));
    assert_true(mk_sigmoidf(-200.0f) == 0.0f && mk_sigmoidf(200.0f) == 1.0f);
    assert_true(mk_siluf(-200.0f) == 0.0f && mk_siluf(200.0f) == 200.0f);
}

static void test_sincos(void **state)
{
    (void)state;
    float s, c;
    for (int pass = 0; pass < 3; pass++) {
        double hi = pass == 0 ? 8.0 : pass == 1 ? 5000.0 : 1048576.0;
        EACH_FLOAT(x, -hi, hi, 3e5)
        {
            float x = (float)x_d;
            mk_sincosf(x, &s, &c);
            see(s, sin((double)x), x, "sin", 0.51);
            see(c, cos((double)x), x, "cos", 0.51);
        }
    }
    say("sincos");
    mk_sincosf(0.0f, &s, &c);
    assert_true(s == 0.0f && c == 1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_gates),
        cmocka_unit_test(test_sincos),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
