//! The exponential function without branches: a loop over it becomes SIMD instructions on every host, and each
//! operation is rounded on its own, so that all of them compute the same bits.

/// `e^x` within 1.1 units in the last place; 0 below −103.98, infinite above 88.73, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³: what is added to it is rounded to a whole number
    // Comparisons, not `clamp`, so that a NaN stays what it is.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // The first part of ln 2 has few bits: its multiples are exact.
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let value = (p * (r * r) + r) + 1.0;
    // In two steps, since 2ⁿ itself may be subnormal or too large.
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = power >> 1;
    let scale = |power: i32| f32::from_bits((power.wrapping_add(127) as u32).wrapping_shl(23));
    value * scale(half) * scale(power.wrapping_sub(half))
}

/// `e^x` in f64, for `x` that are not positive; 0 below −708.
#[inline(always)]
pub fn exp_of_negative(x: f64) -> f64 {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²
    let vanished = x < -708.0;
    let x = if vanished { -708.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_147_180_369_123_8) - n * 1.908_214_929_270_587_7e-10;
    // Taylor's series: the next term is below half a unit in the last place.
    let mut p = 1.0 / 6_227_020_800.0;
    for factorial in [
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5_040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
    ] {
        p = p * r + 1.0 / factorial;
    }
    let value = p * r + 1.0;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let scaled = value * f64::from_bits(power.wrapping_add(1023).wrapping_shl(52));
    if vanished { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_close_to_the_exact_value_everywhere() {
        let mut x = -87.0f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 1.4e-7, "{x}: {error}");
            x += 0.001_37;
        }
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
    }

    #[test]
    fn the_ends_are_what_they_should_be() {
        assert_eq!((exp(f32::NEG_INFINITY), exp(-104.0), exp(-1e30)), (0.0, 0.0, 0.0));
        assert_eq!((exp(89.0), exp(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-100.0) > 0.0 && (exp(-100.0) - 3.8e-44).abs() < 2e-45);
        assert!(exp(88.7).is_finite());
    }

    #[test]
    fn in_f64_it_is_as_good_as_the_library() {
        let mut x = 0.0f64;
        while x > -700.0 {
            let exact = libm::exp(x);
            assert!((exp_of_negative(x) - exact).abs() <= 4e-16 * exact, "{x}");
            x -= 0.0137;
        }
        assert_eq!((exp_of_negative(0.0), exp_of_negative(-709.0)), (1.0, 0.0));
        assert_eq!(exp_of_negative(f64::NEG_INFINITY), 0.0);
    }
}
