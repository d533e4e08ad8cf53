/* The kernels for 64-bit Arm, where every processor has these instructions. */

#include "native.h"

#if defined(__aarch64__) && defined(__ARM_NEON)

#include <math.h>
#include <string.h>

#define NAME "neon"
#include "lanes_neon.h"
#include "kernels.h"

const kernel_set *
ostinato_neon(void)
{
    return &kernels;
}

#endif
