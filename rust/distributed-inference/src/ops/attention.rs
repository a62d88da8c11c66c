//! Causal attention of one row's query heads over a session's pages of keys and values.

use super::exp::exp;
use crate::kernels::dot::dot;
use crate::kv::PAGE_TOKENS;

/// The online softmax of one query head, page by page (Milakov and Gimelshein, 2018): the largest score so far,
/// the sum of the exponentials and, in `out`, the weighted values are rescaled when a page has a larger one.
///
/// Pages begin at fixed positions, so the result does not depend on how the prompt was cut.
pub struct Online<'a> {
    query: &'a [f32],
    out: &'a mut [f32],
    scale: f32,
    largest: f32,
    sum: f32,
}

impl<'a> Online<'a> {
    /// Nothing seen yet. `out` has as many elements as `query`.
    pub fn new(query: &'a [f32], scale: f32, out: &'a mut [f32]) -> Self {
        out.fill(0.0);
        Self { query, out, scale, largest: f32::NEG_INFINITY, sum: 0.0 }
    }

    /// Takes the first `tokens` positions of a page, at least one: its keys and values, f32 [16, head_dim] each.
    pub fn page(&mut self, keys: &[f32], values: &[f32], tokens: usize) {
        let head_dim = self.query.len();
        let mut scores = [0.0; PAGE_TOKENS];
        let mut larger = self.largest;
        for (score, key) in scores[..tokens].iter_mut().zip(keys.chunks_exact(head_dim)) {
            *score = dot(self.query, key) * self.scale;
            larger = larger.max(*score);
        }
        let shrink = exp(self.largest - larger);
        self.largest = larger;
        self.sum *= shrink;
        self.out.iter_mut().for_each(|out| *out *= shrink);
        let weights = scores.map(|score| exp(score - self.largest));
        for (weight, value) in weights[..tokens].iter().zip(values.chunks_exact(head_dim)) {
            self.sum += weight;
            self.out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
        }
    }

    /// Leaves `softmax(query · keysᵀ · scale) · values` in `out`.
    pub fn end(self) {
        self.out.iter_mut().for_each(|out| *out /= self.sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_give_the_mean_of_the_values_that_are_not_in_the_future() {
        let keys = [0.5; PAGE_TOKENS * 2];
        let values: Vec<f32> = (0..PAGE_TOKENS * 2).map(|i| (i / 2) as f32).collect();
        let mut out = [0.0; 2];
        let mut online = Online::new(&[1.0, 1.0], 1.0, &mut out);
        online.page(&keys, &values, PAGE_TOKENS);
        online.page(&keys, &values, 4);
        online.end();
        let expected = (120.0 + 6.0) / 20.0;
        assert!((out[0] - expected).abs() < 1e-5 && out[0] == out[1], "{out:?}");
    }

    #[test]
    fn scores_far_apart_do_not_overflow() {
        let mut keys = [-300.0; PAGE_TOKENS];
        keys[3] = 300.0;
        let values: Vec<f32> = (0..PAGE_TOKENS).map(|i| i as f32).collect();
        let mut out = [0.0];
        let mut online = Online::new(&[1.0], 1.0, &mut out);
        online.page(&keys, &values, PAGE_TOKENS);
        online.end();
        assert_eq!(out, [3.0]);
    }
}
