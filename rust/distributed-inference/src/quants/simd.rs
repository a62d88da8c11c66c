//! The few SIMD128 steps that the formats share. Each does to sixteen elements what the plain reading
//! does to one, with the same roundings: widen, convert, multiply, then add or subtract.

use super::Block;
use crate::kernels::dot::Lanes;
use core::arch::wasm32::*;

/// Sixteen consecutive values of a block.
pub type Sixteen = [v128; 4];

/// A format that is read sixteen values at a time.
pub trait Sixteens: Block {
    /// Gives the block's values to `take`, in order.
    fn sixteens(block: &[u8], take: impl FnMut(Sixteen));
}

/// Turns blocks into values.
pub fn blocks<B: Sixteens>(bytes: &[u8], out: &mut [f32]) {
    for (block, values) in bytes.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::ELEMENTS)) {
        let mut at = 0;
        B::sixteens(block, |sixteen| {
            store(sixteen, &mut values[at..at + 16]);
            at += 16;
        });
    }
}

/// Accumulates the products of blocks and `x` in the order of [`crate::kernels::dot`].
pub fn dot<B: Sixteens>(bytes: &[u8], x: &[f32], lanes: &mut Lanes) {
    let mut sums = [load_floats(&lanes[..4]), load_floats(&lanes[4..])];
    for (block, x) in bytes.chunks_exact(B::BYTES).zip(x.chunks_exact(B::ELEMENTS)) {
        let mut at = 0;
        B::sixteens(block, |sixteen| {
            let x = &x[at..at + 16];
            for (i, value) in sixteen.into_iter().enumerate() {
                let product = f32x4_mul(value, load_floats(&x[4 * i..4 * i + 4]));
                sums[i % 2] = f32x4_add(sums[i % 2], product);
            }
            at += 16;
        });
    }
    let [low, high] = sums;
    *lanes = [
        f32x4_extract_lane::<0>(low),
        f32x4_extract_lane::<1>(low),
        f32x4_extract_lane::<2>(low),
        f32x4_extract_lane::<3>(low),
        f32x4_extract_lane::<0>(high),
        f32x4_extract_lane::<1>(high),
        f32x4_extract_lane::<2>(high),
        f32x4_extract_lane::<3>(high),
    ];
}

/// Sixteen bytes.
#[inline(always)]
pub fn load(bytes: &[u8]) -> v128 {
    let bytes: &[u8; 16] = bytes.try_into().expect("sixteen bytes");
    // SAFETY: the array has the 16 bytes that are read, and v128 loads need no alignment.
    unsafe { v128_load(bytes.as_ptr().cast()) }
}

/// Four floats.
#[inline(always)]
fn load_floats(values: &[f32]) -> v128 {
    let values: &[f32; 4] = values.try_into().expect("four floats");
    // SAFETY: the array has the 16 bytes that are read, and v128 loads need no alignment.
    unsafe { v128_load(values.as_ptr().cast()) }
}

/// The low and the high nibbles of sixteen bytes.
#[inline(always)]
pub fn nibbles(bytes: v128) -> (v128, v128) {
    (v128_and(bytes, u8x16_splat(15)), v128_and(u16x8_shr(bytes, 4), u8x16_splat(15)))
}

/// Bits 0 and 1, 2 and 3, 4 and 5, 6 and 7 of sixteen bytes, each pair at bits 4 and 5.
#[inline(always)]
pub fn pairs_of_bits(bytes: v128) -> [v128; 4] {
    // Shifted as 16-bit numbers, for which there are instructions; what crosses into the next byte is masked.
    [u16x8_shl(bytes, 4), u16x8_shl(bytes, 2), bytes, u16x8_shr(bytes, 2)]
        .map(|shifted| v128_and(shifted, u8x16_splat(0x30)))
}

/// The bits of both.
#[inline(always)]
pub fn joined(low: v128, high: v128) -> v128 {
    v128_or(low, high)
}

/// Sixteen bits as sixteen bytes of all ones or all zeros.
#[inline(always)]
pub fn spread_bits(bits: [u8; 2]) -> v128 {
    let (a, b) = (bits[0], bits[1]);
    let bytes = u8x16(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b);
    let each = u8x16(1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128);
    u8x16_eq(v128_and(bytes, each), each)
}

/// `bytes` with `bit` set where `mask` is all ones.
#[inline(always)]
pub fn with_bit(bytes: v128, mask: v128, bit: u8) -> v128 {
    v128_or(bytes, v128_and(mask, u8x16_splat(bit)))
}

/// Signed bytes less `offset`.
#[inline(always)]
pub fn minus(bytes: v128, offset: i8) -> v128 {
    i8x16_sub(bytes, i8x16_splat(offset))
}

/// Signed bytes as four times four floats.
#[inline(always)]
fn floats(bytes: v128) -> [v128; 4] {
    let (low, high) = (i16x8_extend_low_i8x16(bytes), i16x8_extend_high_i8x16(bytes));
    [
        f32x4_convert_i32x4(i32x4_extend_low_i16x8(low)),
        f32x4_convert_i32x4(i32x4_extend_high_i16x8(low)),
        f32x4_convert_i32x4(i32x4_extend_low_i16x8(high)),
        f32x4_convert_i32x4(i32x4_extend_high_i16x8(high)),
    ]
}

#[inline(always)]
fn store(values: Sixteen, out: &mut [f32]) {
    let out: &mut [f32; 16] = out.try_into().expect("room for sixteen values");
    for (i, value) in values.into_iter().enumerate() {
        // SAFETY: four values at each of the places 0, 4, 8 and 12 of an array of sixteen.
        unsafe { v128_store(out.as_mut_ptr().add(4 * i).cast(), value) };
    }
}

/// Sixteen signed bytes, the first eight times `d` and the others times `m`.
#[inline(always)]
pub fn eight_and_eight(bytes: v128, d: f32, m: f32) -> [f32; 16] {
    let [a, b, e, f] = floats(bytes);
    let (d, m) = (f32x4_splat(d), f32x4_splat(m));
    let mut out = [0.0; 16];
    store([f32x4_mul(d, a), f32x4_mul(d, b), f32x4_mul(m, e), f32x4_mul(m, f)], &mut out);
    out
}

/// Sixteen signed bytes, times `d`.
#[inline(always)]
pub fn scaled(bytes: v128, d: f32) -> Sixteen {
    let d = f32x4_splat(d);
    floats(bytes).map(|q| f32x4_mul(d, q))
}

/// Sixteen signed bytes, times `d`, plus `m`.
#[inline(always)]
pub fn scaled_plus(bytes: v128, d: f32, m: f32) -> Sixteen {
    let m = f32x4_splat(m);
    scaled(bytes, d).map(|value| f32x4_add(value, m))
}

/// Sixteen signed bytes, times `d`, less `m`.
#[inline(always)]
pub fn scaled_minus(bytes: v128, d: f32, m: f32) -> Sixteen {
    let m = f32x4_splat(m);
    scaled(bytes, d).map(|value| f32x4_sub(value, m))
}
