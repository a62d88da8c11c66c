//! The few SIMD128 steps that the formats share. Each does to sixteen elements what the plain reading
//! does to one, with the same roundings: widen, convert, multiply, then add or subtract.

use super::Block;
use core::arch::wasm32::*;

pub fn blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    for (block, values) in bytes.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::ELEMENTS)) {
        B::dequantise_simd(block, values);
    }
}

/// Sixteen bytes.
#[inline(always)]
pub fn load(bytes: &[u8]) -> v128 {
    let bytes: &[u8; 16] = bytes.try_into().expect("sixteen bytes");
    // SAFETY: the array has the 16 bytes that are read, and v128 loads need no alignment.
    unsafe { v128_load(bytes.as_ptr().cast()) }
}

/// The low and the high nibbles of sixteen bytes.
#[inline(always)]
pub fn nibbles(bytes: v128) -> (v128, v128) {
    (v128_and(bytes, u8x16_splat(15)), u8x16_shr(bytes, 4))
}

/// Bits `shift` and on of sixteen bytes, under `mask`.
#[inline(always)]
pub fn bits(bytes: v128, shift: u32, mask: u8) -> v128 {
    v128_and(u8x16_shr(bytes, shift), u8x16_splat(mask))
}

/// `low` with `high` above its lower `shift` bits.
#[inline(always)]
pub fn joined(low: v128, high: v128, shift: u32) -> v128 {
    v128_or(low, u8x16_shl(high, shift))
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
fn store(values: [v128; 4], out: &mut [f32]) {
    let out: &mut [f32; 16] = out.try_into().expect("room for sixteen values");
    for (i, value) in values.into_iter().enumerate() {
        // SAFETY: four values at each of the places 0, 4, 8 and 12 of an array of sixteen.
        unsafe { v128_store(out.as_mut_ptr().add(4 * i).cast(), value) };
    }
}

/// Sixteen signed bytes, times `d`.
#[inline(always)]
pub fn store_scaled(bytes: v128, d: f32, out: &mut [f32]) {
    let d = f32x4_splat(d);
    store(floats(bytes).map(|q| f32x4_mul(d, q)), out);
}

/// Sixteen signed bytes, times `d`, plus `m`.
#[inline(always)]
pub fn store_scaled_plus(bytes: v128, d: f32, m: f32, out: &mut [f32]) {
    let (d, m) = (f32x4_splat(d), f32x4_splat(m));
    store(floats(bytes).map(|q| f32x4_add(f32x4_mul(d, q), m)), out);
}

/// Sixteen signed bytes, times `d`, less `m`.
#[inline(always)]
pub fn store_scaled_minus(bytes: v128, d: f32, m: f32, out: &mut [f32]) {
    let (d, m) = (f32x4_splat(d), f32x4_splat(m));
    store(floats(bytes).map(|q| f32x4_sub(f32x4_mul(d, q), m)), out);
}
