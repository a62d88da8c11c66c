//! Rotary position embedding (Su et al., 2021).

/// Which elements of a head are turned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Elements 2i and 2i + 1, as GGUF permutes the weights of llama models.
    Interleaved,
    /// Elements i and i + rope_dim / 2, as qwen2 and most others have it.
    Halves,
}

/// Radians a position, for each of `rope_dim / 2` pairs: `theta^(−2i / rope_dim)`, in f64.
pub fn frequencies(rope_dim: usize, theta: f32) -> Vec<f64> {
    let exponent = |pair| -2.0 * pair as f64 / rope_dim as f64;
    (0..rope_dim / 2).map(|pair| libm::pow(f64::from(theta), exponent(pair))).collect()
}

/// Writes cosine and sine of each pair's angle at `position`: f32 [pairs, 2], computed in f64.
pub fn angles(position: u32, frequencies: &[f64], out: &mut [f32]) {
    for (out, frequency) in out.chunks_exact_mut(2).zip(frequencies) {
        let (sine, cosine) = libm::sincos(f64::from(position) * frequency);
        out[0] = cosine as f32;
        out[1] = sine as f32;
    }
}

/// Turns the first `angles.len()` elements of every head of `heads`, f32 [n_heads, head_dim].
pub fn rotate(heads: &mut [f32], head_dim: usize, pairing: Pairing, angles: &[f32]) {
    let pairs = angles.len() / 2;
    for head in heads.chunks_exact_mut(head_dim) {
        for (pair, angle) in angles.chunks_exact(2).enumerate() {
            let (a, b) = match pairing {
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                Pairing::Halves => (pair, pair + pairs),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * angle[0] - y * angle[1];
            head[b] = x * angle[1] + y * angle[0];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_turns_nothing() {
        let mut out = [9.0; 4];
        angles(0, &frequencies(4, 1e4), &mut out);
        assert_eq!(out, [1.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_two_pairings_turn_different_elements_and_leave_the_rest() {
        let quarter = [0.0, 1.0, 1.0, 0.0];
        let mut heads = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut heads, 5, Pairing::Interleaved, &quarter);
        assert_eq!(heads, [-2.0, 1.0, 3.0, 4.0, 5.0]);
        let mut heads = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut heads, 5, Pairing::Halves, &quarter);
        assert_eq!(heads, [-3.0, 2.0, 1.0, 4.0, 5.0]);
    }
}
