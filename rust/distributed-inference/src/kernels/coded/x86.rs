//! x86-64: AVX2 with 16-bit products, AVX-VNNI and AVX-512 VNNI with products of bytes, chosen at run time.

use super::entries::{entries, tile_entry};
use super::isa::Isa;
use super::{Kernels, Layout, MOST_ROWS, Panel, Rows, Tile, Unpack};
use crate::kernels::acts::Acts;
use crate::quants::Codes;
use core::arch::x86_64::*;

/// The kernels of a format for everything that this processor has, the fastest first.
pub fn kernels<F: Codes>() -> impl Iterator<Item = Kernels> {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let vnni = avx2 && is_x86_feature_detected!("avxvnni");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni");
    let with_narrow = || Kernels { narrow: Some(Avx512Narrow::tile_of::<F>()), ..Avx512::kernels::<F>() };
    [(avx512, with_narrow as fn() -> Kernels), (vnni, Vnni::kernels::<F>), (avx2, Avx2::kernels::<F>)]
        .into_iter()
        .filter_map(|(has, kernels)| has.then(kernels))
}

/// AVX2 and F16C.
struct Avx2;
/// With AVX-VNNI.
struct Vnni;
/// With AVX-512 VNNI.
struct Avx512;
/// The same with 256 bits for rows of activations: eight of them would leave half of 512 bits empty.
struct Avx512Narrow;

entries!(Avx2, "avx2,f16c");
entries!(Vnni, "avx2,f16c,avxvnni");
entries!(Avx512, "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
tile_entry!(Avx512Narrow, "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni");

/// What eight weight rows in the lanes of 256 bits have in common.
macro_rules! eight_rows {
    () => {
        const ROWS: usize = 8;
        type Constants = ();
        type Pair = __m256i;
        type Part = __m256i;
        type Ints = __m256i;
        type Floats = __m256;

        #[inline(always)]
        unsafe fn constants() {}
        #[inline(always)]
        unsafe fn pairs<F: Codes>(_: &(), block: *const u8, take: impl FnMut(usize, __m256i)) {
            unsafe { F::pairs(block, take) }
        }
        #[inline(always)]
        unsafe fn no_part() -> __m256i {
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        unsafe fn reduce<const UNIT: usize>(p: &[__m256i; MOST_ROWS]) -> [__m256i; 2] {
            unsafe {
                // Each half of 128 bits has its sixteen elements' sums: rows 0 to 3, then rows 4 to 7.
                let a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
                let b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
                let first = _mm256_permute2x128_si256::<0x20>(a, b);
                let second = _mm256_permute2x128_si256::<0x31>(a, b);
                if UNIT == 32 {
                    let sum = _mm256_add_epi32(first, second);
                    return [sum, sum];
                }
                [first, second]
            }
        }
        #[inline(always)]
        unsafe fn less(a: __m256i, b: i32) -> __m256i {
            unsafe { _mm256_sub_epi32(a, _mm256_set1_epi32(b)) }
        }
        #[inline(always)]
        unsafe fn floats(a: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(a) }
        }
        #[inline(always)]
        unsafe fn splat(a: f32) -> __m256 {
            unsafe { _mm256_set1_ps(a) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn halves(_: &(), blocks: &[*const u8; MOST_ROWS], at: usize) -> __m256 {
            unsafe {
                let bits = blocks.map(|block| block.add(at).cast::<i16>().read_unaligned());
                let [a, b, c, d, e, f, g, h] = bits;
                _mm256_cvtph_ps(_mm_setr_epi16(a, b, c, d, e, f, g, h))
            }
        }
        #[inline(always)]
        unsafe fn halves_of(_: &(), bits: __m256i) -> __m256 {
            unsafe {
                // The lower halves of each 128 bits to their start, then beside each other.
                let order = _mm256_set1_epi64x(0x0D0C_0908_0504_0100);
                let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_shuffle_epi8(bits, order));
                _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
            }
        }
        #[inline(always)]
        unsafe fn words(blocks: &[*const u8; MOST_ROWS], at: usize) -> [__m256i; 4] {
            unsafe {
                let row =
                    |i: usize| _mm256_loadu2_m128i(blocks[i + 4].add(at).cast(), blocks[i].add(at).cast());
                let (a, b, c, d) = (row(0), row(1), row(2), row(3));
                let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let (low_2, high_2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                [
                    _mm256_unpacklo_epi64(low, low_2),
                    _mm256_unpackhi_epi64(low, low_2),
                    _mm256_unpacklo_epi64(high, high_2),
                    _mm256_unpackhi_epi64(high, high_2),
                ]
            }
        }
        #[inline(always)]
        unsafe fn and(a: __m256i, b: u32) -> __m256i {
            unsafe { _mm256_and_si256(a, _mm256_set1_epi32(b as i32)) }
        }
        #[inline(always)]
        unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_or_si256(a, b) }
        }
        #[inline(always)]
        unsafe fn left<const BITS: u32>(a: __m256i) -> __m256i {
            unsafe { _mm256_sll_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
        }
        #[inline(always)]
        unsafe fn right<const BITS: u32>(a: __m256i) -> __m256i {
            unsafe { _mm256_srl_epi32(a, _mm_cvtsi32_si128(BITS as i32)) }
        }
        #[inline(always)]
        unsafe fn byte<const BYTE: usize>(_: &(), a: __m256i) -> __m256 {
            unsafe {
                let moved = _mm256_srl_epi32(a, _mm_cvtsi32_si128(8 * BYTE as i32));
                _mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(0xFF)))
            }
        }
        #[inline(always)]
        unsafe fn signed_byte<const BYTE: usize>(a: __m256i) -> __m256 {
            unsafe {
                let high =
                    if BYTE == 3 { a } else { _mm256_sll_epi32(a, _mm_cvtsi32_si128(24 - 8 * BYTE as i32)) };
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(high))
            }
        }
        #[inline(always)]
        unsafe fn store(a: __m256, out: *mut f32) {
            unsafe { _mm256_storeu_ps(out, a) }
        }
        #[inline(always)]
        unsafe fn prefetch<const NEAREST: bool>(at: *const u8) {
            unsafe {
                if NEAREST {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast());
                } else {
                    _mm_prefetch::<_MM_HINT_T1>(at.cast());
                }
            }
        }
    };
}

/// Activation rows in the lanes of a vector.
macro_rules! lanes {
    ($lanes:literal, $tile_rows:literal, $ints:ident, $floats:ident, $zero:ident, $splat:ident, $load:ident, $shift:ident, $less:ident, $convert:ident, $load_floats:ident, $store_floats:ident, $float:ident, $mul:ident, $add:ident, $sub:ident) => {
        const LANES: usize = $lanes;
        const TILE_ROWS: usize = $tile_rows;
        type LaneInts = $ints;
        type LaneFloats = $floats;
        type LaneSums = $ints;

        #[inline(always)]
        unsafe fn lane_zero() -> $ints {
            unsafe { $zero() }
        }
        #[inline(always)]
        unsafe fn lane_splat(word: *const u8) -> $ints {
            unsafe { $splat(word.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn lane_load(at: *const u8) -> $ints {
            unsafe { $load(at.cast()) }
        }
        #[inline(always)]
        unsafe fn lane_shift(a: $ints) -> $ints {
            unsafe { $shift::<8>(a) }
        }
        #[inline(always)]
        unsafe fn lane_ints(a: $ints) -> $ints {
            a
        }
        #[inline(always)]
        unsafe fn lane_less(a: $ints, b: $ints) -> $ints {
            unsafe { $less(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_floats(a: $ints) -> $floats {
            unsafe { $convert(a) }
        }
        #[inline(always)]
        unsafe fn lane_load_floats(at: *const f32) -> $floats {
            unsafe { $load_floats(at) }
        }
        #[inline(always)]
        unsafe fn lane_store_floats(a: $floats, at: *mut f32) {
            unsafe { $store_floats(at, a) }
        }
        #[inline(always)]
        unsafe fn lane_float(a: f32) -> $floats {
            unsafe { $float(a) }
        }
        #[inline(always)]
        unsafe fn lane_mul(a: $floats, b: $floats) -> $floats {
            unsafe { $mul(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_add(a: $floats, b: $floats) -> $floats {
            unsafe { $add(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_sub(a: $floats, b: $floats) -> $floats {
            unsafe { $sub(a, b) }
        }
    };
}

macro_rules! eight_lanes {
    ($tile_rows:literal) => {
        lanes!(
            8,
            $tile_rows,
            __m256i,
            __m256,
            _mm256_setzero_si256,
            _mm256_set1_epi32,
            _mm256_loadu_si256,
            _mm256_slli_epi32,
            _mm256_sub_epi32,
            _mm256_cvtepi32_ps,
            _mm256_loadu_ps,
            _mm256_storeu_ps,
            _mm256_set1_ps,
            _mm256_mul_ps,
            _mm256_add_ps,
            _mm256_sub_ps
        );
    };
}

macro_rules! bytes_of_codes {
    ($dot:ident, $lanes:ident, $lane_dot:ident) => {
        const WIDE: bool = false;

        #[inline(always)]
        unsafe fn part<const UNIT: usize>(codes: __m256i, x: *const u8) -> __m256i {
            unsafe {
                let high = $dot(_mm256_setzero_si256(), codes, _mm256_loadu_si256(x.cast()));
                $dot(_mm256_slli_epi32::<8>(high), codes, _mm256_loadu_si256(x.add(32).cast()))
            }
        }
        #[inline(always)]
        unsafe fn write(codes: __m256i, out: *mut u8) {
            unsafe { _mm256_storeu_si256(out.cast(), codes) }
        }
        #[inline(always)]
        unsafe fn lane_dot(sums: $lanes, codes: $lanes, x: $lanes) -> $lanes {
            unsafe { $lane_dot(sums, codes, x) }
        }
    };
}

impl Isa for Avx2 {
    eight_rows!();
    eight_lanes!(4);
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn part<const UNIT: usize>(codes: __m256i, x: *const u8) -> __m256i {
        unsafe {
            // Within each half of 128 bits: the first eight codes, then the others.
            let zero = _mm256_setzero_si256();
            let (low, high) = (_mm256_unpacklo_epi8(codes, zero), _mm256_unpackhi_epi8(codes, zero));
            let x = |i: usize| _mm256_loadu2_m128i(x.add(32 + 16 * i).cast(), x.add(16 * i).cast());
            _mm256_add_epi32(_mm256_madd_epi16(low, x(0)), _mm256_madd_epi16(high, x(1)))
        }
    }
    #[inline(always)]
    unsafe fn write(codes: __m256i, out: *mut u8) {
        unsafe {
            let (first, second) = (_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
            _mm256_storeu_si256(out.cast(), _mm256_cvtepu8_epi16(first));
            _mm256_storeu_si256(out.add(32).cast(), _mm256_cvtepu8_epi16(second));
        }
    }
    #[inline(always)]
    unsafe fn lane_dot(sums: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(codes, x)) }
    }
}

impl Isa for Vnni {
    eight_rows!();
    eight_lanes!(4);
    bytes_of_codes!(_mm256_dpbusd_avx_epi32, __m256i, _mm256_dpbusd_avx_epi32);
}

impl Isa for Avx512Narrow {
    eight_rows!();
    eight_lanes!(8);
    bytes_of_codes!(_mm256_dpbusd_epi32, __m256i, _mm256_dpbusd_epi32);
}

impl Isa for Avx512 {
    eight_rows!();
    bytes_of_codes!(_mm256_dpbusd_epi32, __m512i, _mm512_dpbusd_epi32);
    lanes!(
        16,
        8,
        __m512i,
        __m512,
        _mm512_setzero_si512,
        _mm512_set1_epi32,
        _mm512_loadu_si512,
        _mm512_slli_epi32,
        _mm512_sub_epi32,
        _mm512_cvtepi32_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_mul_ps,
        _mm512_add_ps,
        _mm512_sub_ps
    );
}
