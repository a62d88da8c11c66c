//! What happens between the matrix products. Transcendental functions come from the `libm` crate or from
//! [`exp`], so that every host computes the same bits.

pub mod attention;
pub mod exp;
pub mod norm;
pub mod rope;
pub mod silu;

/// Where the first NaN or infinity of `values` is.
pub fn first_not_finite(values: &[f32]) -> Option<usize> {
    // A sum of magnitudes would overflow; the exponent bits tell without arithmetic.
    values.iter().position(|value| !value.is_finite())
}
