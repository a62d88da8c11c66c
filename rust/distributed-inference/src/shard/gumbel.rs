//! Gumbel noise that is a function of seed and token id alone.
//!
//! The best of `logit + noise` over a vocabulary is an exact sample of its softmax (Gumbel, 1954;
//! "Gumbel-max trick"). Since an id's noise does not depend on the ids around it, shards can each rank
//! their own slice: the sample is the same however many there are.

/// The golden ratio in 64 bits: what SplitMix64 counts with.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's finaliser (Steele, Lea and Flood, 2014): every bit of the input reaches every bit of the output.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// The noise of `id` under `seed`: `−ln(−ln u)`, with u = (h + ½) / 2⁵³ from the upper 53 bits of
/// `h = mix(mix(seed) + (id + 1) · STEP)`.
pub fn noise(seed: u64, id: u32) -> f64 {
    let counter = (u64::from(id) + 1).wrapping_mul(STEP);
    let bits = mix(mix(seed).wrapping_add(counter)) >> 11;
    let unit = (bits as f64 + 0.5) / (1u64 << 53) as f64;
    -libm::log(-libm::log(unit))
}

#[cfg(test)]
mod tests {
    use super::noise;

    #[test]
    fn the_moments_are_those_of_the_distribution() {
        for seed in [0, 1, u64::MAX] {
            let values: Vec<f64> = (0..200_000).map(|id| noise(seed, id)).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
            assert!((mean - 0.577_215_66).abs() < 0.015, "{mean}");
            assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.04, "{variance}");
        }
    }

    #[test]
    fn neighbouring_seeds_are_unrelated() {
        let products: f64 =
            (0..100_000).map(|id| (noise(7, id) - 0.577) * (noise(8, id) - 0.577)).sum::<f64>() / 1e5;
        assert!(products.abs() < 0.02, "{products}");
    }
}
