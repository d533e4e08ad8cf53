/* Finds the instruction sets that the processor has and whose registers the operating system saves.
 * Uses cpuid directly, since compilers differ in the names that __builtin_cpu_supports accepts. */

#include <cpuid.h>

/* True for AVX2 with FMA and F16C; `wide`: also AVX-512 F, BW, DQ and VL. */
static int
x86_has(int wide)
{
    unsigned eax, ebx, ecx, edx, saved, saved_high;
    const unsigned first = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    const unsigned more = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & first) != first)
        return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    if (!(ebx & bit_AVX2))
        return 0;
    return !wide || ((saved & 0xE0) == 0xE0 && (ebx & more) == more);
}
