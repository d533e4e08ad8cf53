/* The kernels without instructions of a particular processor, for all other processors. */

#include "native.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed weights are little endian"
#endif

#include <math.h>
#include <string.h>

#define NAME "plain"
#include "lanes_plain.h"
#include "kernels.h"

const kernel_set *
ostinato_plain(void)
{
    return &kernels;
}
