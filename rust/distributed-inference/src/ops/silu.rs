//! The gate of the feed-forward network.

use super::exp::exp;

/// `x · sigmoid(x)` (Elfwing et al., 2017).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::silu;

    #[test]
    fn the_ends_are_finite() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(1e30), 1e30);
        assert_eq!(silu(-1e30), 0.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-7);
    }
}
