//! Causal attention of one query over a session's pages of keys and values.

use crate::kernels::dot::dot;
use crate::kv::PAGE_TOKENS;

/// `out = softmax(query · keysᵀ · scale) · values` for one head of one row, over positions `0..tokens`.
///
/// `pages` gives for each page the head's keys and values, f32 [16, head_dim] each. The softmax is taken
/// online (Milakov and Gimelshein, 2018), one page at a time: the largest score so far, the sum of the
/// exponentials and the weighted values are rescaled when a page has a larger one. Pages begin at fixed
/// positions, so the result does not depend on how the prompt was cut.
pub fn attend<'a>(
    query: &[f32],
    pages: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    tokens: usize,
    scale: f32,
    out: &mut [f32],
) {
    let head_dim = query.len();
    let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    out.fill(0.0);
    for (page, (keys, values)) in pages.enumerate() {
        let here = PAGE_TOKENS.min(tokens - page * PAGE_TOKENS);
        let mut scores = [0.0; PAGE_TOKENS];
        let mut larger = largest;
        for (score, key) in scores[..here].iter_mut().zip(keys.chunks_exact(head_dim)) {
            *score = dot(query, key) * scale;
            larger = larger.max(*score);
        }
        let shrink = libm::expf(largest - larger);
        largest = larger;
        sum *= shrink;
        out.iter_mut().for_each(|out| *out *= shrink);
        for (score, value) in scores[..here].iter().zip(values.chunks_exact(head_dim)) {
            let weight = libm::expf(score - largest);
            sum += weight;
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
        }
    }
    out.iter_mut().for_each(|out| *out /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_give_the_mean_of_the_values_that_are_not_in_the_future() {
        let keys = [0.5; PAGE_TOKENS * 2];
        let values: Vec<f32> = (0..PAGE_TOKENS * 2).map(|i| (i / 2) as f32).collect();
        let pages = [(&keys[..], &values[..]), (&keys[..], &values[..])];
        let mut out = [0.0; 2];
        attend(&[1.0, 1.0], pages.into_iter(), PAGE_TOKENS + 4, 1.0, &mut out);
        let expected = (120.0 + 6.0) / 20.0;
        assert!((out[0] - expected).abs() < 1e-5 && out[0] == out[1], "{out:?}");
    }

    #[test]
    fn scores_far_apart_do_not_overflow() {
        let mut keys = [-300.0; PAGE_TOKENS];
        keys[3] = 300.0;
        let values: Vec<f32> = (0..PAGE_TOKENS).map(|i| i as f32).collect();
        let mut out = [0.0];
        attend(&[1.0], [(&keys[..], &values[..])].into_iter(), PAGE_TOKENS, 1.0, &mut out);
        assert_eq!(out, [3.0]);
    }
}
