/* The kernels in plain C, for processors without the instructions of the others. */

#include "native.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NAME "plain"
#include "lanes_plain.h"
#include "kernels.h"

const kernel_set *
ostinato_plain(void)
{
    return &kernels;
}
