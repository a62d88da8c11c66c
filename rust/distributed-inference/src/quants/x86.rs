//! The few AVX2 steps that the formats share: 32 codes are one vector.

use core::arch::x86_64::*;

/// The nibbles of sixteen bytes: the low ones, then the high ones.
///
/// # Safety
/// There are sixteen bytes at `at`, and the processor has AVX2.
#[inline(always)]
pub unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: as said.
    unsafe {
        let bytes = _mm_loadu_si128(at.cast());
        let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(bytes), _mm_srli_epi16::<4>(bytes));
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// Thirty-two bits as bytes of 16 or 0.
///
/// # Safety
/// There are four bytes at `at`, and the processor has AVX2.
#[inline(always)]
pub unsafe fn fifths(at: *const u8) -> __m256i {
    // SAFETY: as said.
    unsafe {
        let bits = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
        let places = _mm256_set_epi64x(
            0x0303_0303_0303_0303,
            0x0202_0202_0202_0202,
            0x0101_0101_0101_0101,
            0x0000_0000_0000_0000,
        );
        // Bits other than the byte's own are set, so that all ones says that it was.
        let others = _mm256_set1_epi64x(0x7FBF_DFEF_F7FB_FDFEu64 as i64);
        let set = _mm256_or_si256(_mm256_shuffle_epi8(bits, places), others);
        _mm256_and_si256(_mm256_cmpeq_epi8(set, _mm256_set1_epi8(-1)), _mm256_set1_epi8(16))
    }
}

/// Thirty-two bytes.
///
/// # Safety
/// There are thirty-two bytes at `at`, and the processor has AVX2.
#[inline(always)]
pub unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: as said.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Low nibbles of all bytes, shifted right by `BITS` before.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn low<const BITS: i32>(bytes: __m256i) -> __m256i {
    // SAFETY: as said.
    unsafe { _mm256_and_si256(_mm256_srli_epi16::<BITS>(bytes), _mm256_set1_epi8(15)) }
}

/// Bit `bit` of each byte, as 16 or 0.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn bit_as_fifth(bytes: __m256i, bit: usize) -> __m256i {
    // SAFETY: as said.
    unsafe {
        let mask = _mm256_set1_epi8((1u8 << bit) as i8);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}
