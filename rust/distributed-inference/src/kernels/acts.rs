//! Rows of activations as integers, for products with coded weights.
//!
//! Every 32 elements of a row share a step: their largest magnitude / 32512, in f32. An element is the nearest
//! multiple of it, ties to even: a 16-bit integer X. Hosts with products of 8-bit integers keep X as two planes,
//! X = 256 · high + low with both in −128..=127; others keep X itself. Sums of products are exact in 32 bits
//! either way, so that the two cannot differ.
//!
//! Rows stand in groups of as many as the host's vectors have lanes, interleaved by four bytes. What is kept
//! of a row depends on that row alone.

/// Elements that share a step.
pub const BLOCK: usize = 32;
/// The largest integer: both planes of it fit a signed byte.
const LARGEST: f32 = 32512.0;
/// Blocks smaller than this everywhere count as zero, so that the reciprocal of no step overflows.
const SMALLEST: f32 = 1e-30;
/// Four-byte words of a block of a row.
const WORDS: usize = BLOCK * 2 / 4;

/// What the kernels of a format need to know of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Elements of a row.
    pub cols: usize,
    /// Rows that stand interleaved.
    pub lanes: usize,
    /// 16-bit integers, instead of two planes of 8 bits.
    pub wide: bool,
    /// Elements that share a weight scale: 16 or 32.
    pub unit: usize,
    /// What is subtracted from the weights' codes, when they have no minimums.
    pub offset: i32,
    /// Whether weights have minimums.
    pub mins: bool,
}

impl Wanted {
    /// Bytes that a row takes.
    pub const fn row_bytes(cols: usize) -> usize {
        2 * cols + 4 * (cols / BLOCK) + 4 * (cols / 16)
    }
}

/// Where the integers, steps and sums of some rows lie.
#[derive(Clone, Copy)]
pub struct Acts<'a> {
    /// What they were made for.
    pub wanted: Wanted,
    /// [group, block, word, lane, 4 bytes]
    pub data: &'a [u32],
    /// [group, block, lane]
    pub steps: &'a [f32],
    /// [group, unit, lane]: offset · ΣX as i32, or step · ΣX as f32 where weights have minimums.
    pub sums: &'a [u32],
}

impl Acts<'_> {
    /// One of rows that do not stand interleaved.
    pub fn row(&self, row: usize) -> Self {
        let Wanted { cols, lanes, unit, .. } = self.wanted;
        debug_assert_eq!(lanes, 1);
        let (data, steps, sums) = (cols / BLOCK * WORDS, cols / BLOCK, cols / unit);
        Self {
            wanted: self.wanted,
            data: &self.data[row * data..][..data],
            steps: &self.steps[row * steps..][..steps],
            sums: &self.sums[row * sums..][..sums],
        }
    }
}

/// Fills `work` with rows, which are f32 [n, cols].
pub fn quantise<'a>(wanted: Wanted, rows: &[f32], work: &'a mut [u32]) -> Acts<'a> {
    let Wanted { cols, lanes, unit, .. } = wanted;
    let (blocks, units) = (cols / BLOCK, cols / unit);
    let groups = (rows.len() / cols).div_ceil(lanes);
    let (data, rest) = work.split_at_mut(groups * lanes * blocks * WORDS);
    let (steps, rest) = rest.split_at_mut(groups * lanes * blocks);
    let steps: &mut [f32] = bytemuck::cast_slice_mut(steps);
    let sums = &mut rest[..groups * lanes * units];
    for (index, row) in rows.chunks_exact(cols).enumerate() {
        let (group, lane) = (index / lanes, index % lanes);
        let data = &mut data[group * lanes * blocks * WORDS..][..lanes * blocks * WORDS];
        let steps = &mut steps[group * lanes * blocks..][..lanes * blocks];
        let sums = &mut sums[group * lanes * units..][..lanes * units];
        quantise_row(wanted, row, lane, data, steps, sums);
    }
    Acts { wanted, data, steps, sums }
}

fn quantise_row(
    wanted: Wanted,
    row: &[f32],
    lane: usize,
    data: &mut [u32],
    steps: &mut [f32],
    sums: &mut [u32],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn with_avx2(
            wanted: Wanted,
            row: &[f32],
            lane: usize,
            data: &mut [u32],
            steps: &mut [f32],
            sums: &mut [u32],
        ) {
            quantise_row_anywhere(wanted, row, lane, data, steps, sums);
        }
        // SAFETY: the processor has the feature.
        return unsafe { with_avx2(wanted, row, lane, data, steps, sums) };
    }
    quantise_row_anywhere(wanted, row, lane, data, steps, sums);
}

#[inline(always)]
fn quantise_row_anywhere(
    wanted: Wanted,
    row: &[f32],
    lane: usize,
    data: &mut [u32],
    steps: &mut [f32],
    sums: &mut [u32],
) {
    let Wanted { lanes, wide, unit, offset, mins, .. } = wanted;
    let mut integers = [0i32; BLOCK];
    for (block, values) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
        let step = integers_of(values, &mut integers);
        steps[block * lanes + lane] = step;
        let mut words = [0u32; WORDS];
        if wide {
            let halves = integers.map(|x| x as i16);
            words.copy_from_slice(bytemuck::cast_slice(&halves));
        } else {
            let high = integers.map(|x| ((x + 128) >> 8) as i8);
            let low = integers.map(|x| x as i8);
            words[..WORDS / 2].copy_from_slice(bytemuck::cast_slice(&high));
            words[WORDS / 2..].copy_from_slice(bytemuck::cast_slice(&low));
        }
        for (place, word) in data[block * lanes * WORDS..].chunks_exact_mut(lanes).zip(words) {
            place[lane] = word;
        }
        for (i, integers) in integers.chunks_exact(unit).enumerate() {
            let sum: i32 = integers.iter().sum();
            let kept = if mins { (step * sum as f32).to_bits() } else { (offset * sum) as u32 };
            sums[(block * (BLOCK / unit) + i) * lanes + lane] = kept;
        }
    }
}

/// The integers of a block; returns their step, which is NaN when the block has a NaN or an infinity.
#[inline(always)]
pub fn integers_of(values: &[f32; BLOCK], integers: &mut [i32; BLOCK]) -> f32 {
    // Magnitudes are ordered like their bits, and a NaN's are the largest.
    let largest = values.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(largest);
    let (scale, step) = match largest {
        _ if !largest.is_finite() => (0.0, f32::NAN),
        _ if largest < SMALLEST => (0.0, 0.0),
        _ => (LARGEST / largest, largest / LARGEST),
    };
    for (integer, value) in integers.iter_mut().zip(values) {
        // Adding 1.5 · 2²³ rounds to a whole number, ties to even, which the lowest bits then hold.
        let rounded = (value * scale + 12_582_912.0).to_bits() as i32 - 0x4B40_0000;
        *integer = if step > 0.0 { rounded } else { 0 };
    }
    step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_the_nearest_multiples_of_the_step() {
        let values: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 - 11.3).powi(3) * 0.37);
        let mut integers = [0; BLOCK];
        let step = integers_of(&values, &mut integers);
        assert_eq!(integers.iter().map(|x| x.abs()).max(), Some(32512));
        for (value, integer) in values.iter().zip(integers) {
            assert!(
                (f64::from(*value) - f64::from(step) * f64::from(integer)).abs() <= f64::from(step) * 0.51
            );
        }
    }

    #[test]
    fn what_is_not_finite_is_seen_and_what_is_tiny_is_zero() {
        let mut integers = [1; BLOCK];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; BLOCK];
            values[7] = bad;
            assert!(integers_of(&values, &mut integers).is_nan());
        }
        for tiny in [0.0, 1e-31, -1e-42] {
            assert_eq!(integers_of(&[tiny; BLOCK], &mut integers), 0.0);
            assert_eq!(integers, [0; BLOCK]);
        }
        assert!(integers_of(&[f32::MAX; BLOCK], &mut integers).is_normal());
        assert_eq!(integers, [32512; BLOCK]);
        assert!(integers_of(&[-1e-30; BLOCK], &mut integers) > 0.0);
        assert_eq!(integers, [-32512; BLOCK]);
    }

    #[test]
    fn the_two_planes_are_the_integer() {
        let row: Vec<f32> = (0..64).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        let wanted = |wide| Wanted { cols: 64, lanes: 1, wide, unit: 16, offset: 8, mins: false };
        let (mut one, mut other) = (vec![0; 4096], vec![0; 4096]);
        let wide = quantise(wanted(true), &row, &mut one);
        let planes = quantise(wanted(false), &row, &mut other);
        let integers: &[i16] = bytemuck::cast_slice(wide.data);
        let bytes: &[i8] = bytemuck::cast_slice(planes.data);
        for (i, x) in integers.iter().enumerate() {
            let (block, at) = (i / 32 * 64, i % 32);
            assert_eq!(i32::from(*x), 256 * i32::from(bytes[block + at]) + i32::from(bytes[block + 32 + at]));
        }
        assert_eq!((wide.steps, wide.sums), (planes.steps, planes.sums));
    }
}
