//! Dot products in one fixed order, whatever computes them.
//!
//! Eight lanes: element `i` is multiplied and added to lane `i mod 8`, in rising order of `i`, with one
//! rounding for the product and one for the sum (no fused multiply-add). The lanes are then summed as
//! `((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))`. A row's result therefore depends on the row and
//! the vector alone, and has the same bits on every host.

/// Lanes of a dot product. A piece of a vector may be accumulated on its own as long as it begins at
/// a multiple of this many elements.
pub const LANES: usize = 8;

/// The partial sums of one dot product.
pub type Lanes = [f32; LANES];

/// The sum of the lanes, in the one order.
#[inline(always)]
pub fn reduce(lanes: &Lanes) -> f32 {
    let [l0, l1, l2, l3, l4, l5, l6, l7] = *lanes;
    ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
}

/// Accumulates the products of `w` and `x`.
#[inline(always)]
pub fn accumulate_plain(lanes: &mut Lanes, w: &[f32], x: &[f32]) {
    let (w_whole, w_tail) = w.as_chunks::<LANES>();
    let (x_whole, x_tail) = x.as_chunks::<LANES>();
    let mut sums = *lanes;
    for (w, x) in w_whole.iter().zip(x_whole) {
        for lane in 0..LANES {
            sums[lane] += w[lane] * x[lane];
        }
    }
    for ((sum, w), x) in sums.iter_mut().zip(w_tail).zip(x_tail) {
        *sum += w * x;
    }
    *lanes = sums;
}

/// The dot product of two vectors of equal length.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [[0.0; LANES]];
    accumulate([a], b, &mut lanes);
    reduce(&lanes[0])
}

/// Accumulates the products of `x` with each row of `w`; all have the same length.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[inline(always)]
pub fn accumulate<const ROWS: usize>(w: [&[f32]; ROWS], x: &[f32], lanes: &mut [Lanes; ROWS]) {
    for (lanes, w) in lanes.iter_mut().zip(w) {
        accumulate_plain(lanes, w, x);
    }
}

/// Accumulates the products of `x` with each row of `w`; all have the same length.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
#[inline(always)]
pub fn accumulate<const ROWS: usize>(w: [&[f32]; ROWS], x: &[f32], lanes: &mut [Lanes; ROWS]) {
    use core::arch::wasm32::*;
    let whole = x.len() / LANES * LANES;
    assert!(w.iter().all(|row| row.len() == x.len()));
    let mut sums = [[f32x4_splat(0.0); 2]; ROWS];
    for (sums, lanes) in sums.iter_mut().zip(&*lanes) {
        let [a, b, c, d, e, f, g, h] = *lanes;
        *sums = [f32x4(a, b, c, d), f32x4(e, f, g, h)];
    }
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + 8 <= whole`, which is at most the length of `x` and, as asserted, of every row.
        unsafe {
            let low = v128_load(x.as_ptr().add(at).cast());
            let high = v128_load(x.as_ptr().add(at + 4).cast());
            for row in 0..ROWS {
                let w = w[row].as_ptr().add(at);
                sums[row][0] = f32x4_add(sums[row][0], f32x4_mul(v128_load(w.cast()), low));
                sums[row][1] = f32x4_add(sums[row][1], f32x4_mul(v128_load(w.add(4).cast()), high));
            }
        }
        at += LANES;
    }
    for row in 0..ROWS {
        // SAFETY: the two halves of an array of eight.
        unsafe {
            v128_store(lanes[row].as_mut_ptr().cast(), sums[row][0]);
            v128_store(lanes[row].as_mut_ptr().add(4).cast(), sums[row][1]);
        }
        accumulate_plain(&mut lanes[row], &w[row][whole..], &x[whole..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    #[test]
    fn the_order_is_the_documented_one() {
        for length in [1, 7, 8, 9, 63, 64, 100] {
            let (a, b) = (numbers(length, 1), numbers(length, 2));
            let mut lanes = [0.0f32; 8];
            for i in 0..length {
                let product = a[i] * b[i];
                lanes[i % 8] += product;
            }
            let [l0, l1, l2, l3, l4, l5, l6, l7] = lanes;
            let expected = ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7));
            assert_eq!(dot(&a, &b).to_bits(), expected.to_bits(), "{length}");
        }
    }

    #[test]
    fn pieces_that_begin_at_whole_lanes_give_the_bits_of_the_whole() {
        let (a, b) = (numbers(1000, 3), numbers(1000, 4));
        let mut lanes = [[0.0; LANES]];
        for (from, to) in [(0, 256), (256, 264), (264, 936), (936, 1000)] {
            accumulate([&a[from..to]], &b[from..to], &mut lanes);
        }
        assert_eq!(reduce(&lanes[0]).to_bits(), dot(&a, &b).to_bits());
    }
}
