//! Root-mean-square normalisation.

/// `out = x / sqrt(mean(x²) + eps) · weight` (Zhang and Sennrich, 2019).
///
/// All of it in f64, each element being rounded to f32 once at its end. The squares are summed in four lanes,
/// element `i` in lane `i mod 4`, and the lanes as `(l0 + l2) + (l1 + l3)`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = scale(x, eps);
    for ((out, value), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = (f64::from(*value) * scale * f64::from(*weight)) as f32;
    }
}

/// [`rms_norm`] whose result takes the place of `x`.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = scale(x, eps);
    for (value, weight) in x.iter_mut().zip(weight) {
        *value = (f64::from(*value) * scale * f64::from(*weight)) as f32;
    }
}

fn scale(x: &[f32], eps: f32) -> f64 {
    let mut lanes = [0.0f64; 4];
    for values in x.chunks(4) {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    let sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    1.0 / libm::sqrt(sum / x.len() as f64 + f64::from(eps))
}

#[cfg(test)]
mod tests {
    use super::rms_norm;

    #[test]
    fn a_constant_vector_becomes_its_weights() {
        let mut out = [0.0; 6];
        rms_norm(&[3.0; 6], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1e-12, &mut out);
        assert_eq!(out, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_zero_vector_stays_zero() {
        let mut out = [1.0; 5];
        rms_norm(&[0.0; 5], &[1.0; 5], 1e-6, &mut out);
        assert_eq!(out, [0.0; 5]);
    }

    #[test]
    fn large_activations_do_not_overflow() {
        let mut out = [0.0; 2];
        rms_norm(&[3e30, -3e30], &[1.0; 2], 1e-6, &mut out);
        assert_eq!(out, [1.0, -1.0]);
    }
}
