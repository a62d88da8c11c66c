//! Selection from a kept slice: the best ids after adjustment, and what merges slices exactly.

use super::{Shard, noise};
use crate::fields::{Fields, number};
use crate::ops::exp::exp_of_negative;
use crate::region::{Exchange, Region};
use crate::{Result, fail};
use std::cmp::Ordering;

/// What a selection works on, in floats an id: the adjusted logit, the key and the order.
pub(super) const WORK_FLOATS: usize = 3;

/// Two f64 and two u32: see [`Shard::select`].
const HEADER_BYTES: usize = 24;
const CANDIDATE_BYTES: usize = 16;
const ADJUST_BYTES: usize = 12;

/// Lower temperatures would overflow; 0 is how a caller says greedy.
const LEAST_TEMPERATURE: f32 = 1e-6;

/// What a selection asks for.
struct Params<'a> {
    top_k: usize,
    seed: Option<u64>,
    temperature: f32,
    adjust: &'a [u8],
    wanted: &'a [u8],
}

impl<'a> Params<'a> {
    const FIELDS_BYTES: usize = 32;

    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let (head, rest) = bytes.split_at(bytes.len().min(Self::FIELDS_BYTES));
        let mut fields = Fields::new("the parameters of the selection", head);
        fields.version(1)?;
        let top_k = fields.u32()? as usize;
        let mode = fields.u32()?;
        let temperature = fields.f32()?;
        let seed = u64::from(fields.u32()?) | u64::from(fields.u32()?) << 32;
        let (n_adjust, n_wanted) = (fields.u32()?, fields.u32()?);
        fields.end()?;
        let expected = ADJUST_BYTES as u64 * u64::from(n_adjust) + 4 * u64::from(n_wanted);
        if rest.len() as u64 != expected {
            fail!(
                BadArgument,
                "{n_adjust} adjustments and {n_wanted} wanted ids take {expected} bytes, found {}",
                rest.len()
            );
        }
        let seed = match mode {
            0 => None,
            1 => Some(seed),
            _ => fail!(Unsupported, "selection mode {mode}, expected 0 (adjusted logit) or 1 (Gumbel)"),
        };
        if temperature != 0.0 && !(temperature.is_finite() && temperature >= LEAST_TEMPERATURE) {
            fail!(BadArgument, "temperature is {temperature}, expected 0 or at least {LEAST_TEMPERATURE}");
        }
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        let (adjust, wanted) = rest.split_at(ADJUST_BYTES * n_adjust as usize);
        Ok(Self { top_k, seed, temperature, adjust, wanted })
    }
}

impl Shard {
    /// Writes the answer for a kept slice; `params` and `answer` are offset and length. Returns its bytes.
    ///
    /// The answer is log-sum-exp of the raw logits and of the adjusted ones (f64), the numbers n and m of
    /// candidates and wanted ids (u32), and n + m times {id u32, raw f32, adjusted f32, key f32}.
    /// Adjusted is `(m(raw) + add) / temperature` with `m(raw) = raw > 0 ? raw / multiply : raw · multiply`;
    /// the key is the adjusted logit, plus Gumbel noise in that mode. Banned ids have −∞ for both.
    pub fn select(
        &self,
        region: &mut Region,
        kept: u32,
        params: (u32, u32),
        answer: (u32, u32),
    ) -> Result<usize> {
        let kept_at = self.kept_at(kept)?;
        let ids = self.config.ids();
        let Exchange { arguments, answer, persistent, scratch } = region.exchange(params, answer)?;
        let params = Params::parse(arguments)?;
        let (top_k, n_wanted) = (params.top_k.min(ids), params.wanted.len() / 4);
        let needed = HEADER_BYTES + (top_k + n_wanted) * CANDIDATE_BYTES;
        if needed > answer.len() {
            fail!(
                OutOfBounds,
                "{top_k} candidates and {n_wanted} wanted ids take {needed} bytes, the answer has room for {}",
                answer.len()
            );
        }
        let raw = &persistent[kept_at..kept_at + ids];
        let (adjusted, keys, order) = self.work(scratch);
        self.adjust(raw, &params, adjusted)?;
        self.rank_by(params.seed, adjusted, keys);
        let found = best(keys, order, top_k);

        let (header, records) = answer.split_at_mut(HEADER_BYTES);
        header[..8].copy_from_slice(&log_sum_exp(raw).to_le_bytes());
        // Without temperature, adjustments and banned ids it is the same sum.
        let same = adjusted == raw;
        let (first, second) = header.split_at_mut(8);
        match same {
            true => second[..8].copy_from_slice(first),
            false => second[..8].copy_from_slice(&log_sum_exp(adjusted).to_le_bytes()),
        }
        header[16..20].copy_from_slice(&(found as u32).to_le_bytes());
        header[20..].copy_from_slice(&(n_wanted as u32).to_le_bytes());
        let mut records = records.chunks_exact_mut(CANDIDATE_BYTES);
        let mut write = |index: usize| {
            if let Some(record) = records.next() {
                let fields = [raw[index], adjusted[index], keys[index]].map(f32::to_bits);
                let fields = [self.config.vocab_start + index as u32, fields[0], fields[1], fields[2]];
                record.copy_from_slice(bytemuck::cast_slice(&fields.map(u32::to_le)));
            }
        };
        order[..found].iter().for_each(|index| write(*index as usize));
        for place in 0..n_wanted {
            write(self.own_index("wanted id", number(params.wanted, place))?);
        }
        Ok(HEADER_BYTES + (found + n_wanted) * CANDIDATE_BYTES)
    }

    /// Adjusted logits, keys and order, in the scratch behind the hidden rows.
    fn work<'a>(&self, scratch: &'a mut [f32]) -> (&'a mut [f32], &'a mut [f32], &'a mut [u32]) {
        let (ids, stride) = (self.config.ids(), self.config.stride());
        let (adjusted, rest) = scratch[self.config.hidden_floats() as usize..].split_at_mut(stride);
        let (keys, order) = rest.split_at_mut(stride);
        (&mut adjusted[..ids], &mut keys[..ids], bytemuck::cast_slice_mut(&mut order[..ids]))
    }

    /// Writes the adjusted logits; −∞ for banned ids.
    fn adjust(&self, raw: &[f32], params: &Params<'_>, adjusted: &mut [f32]) -> Result<()> {
        for (adjusted, raw) in adjusted.iter_mut().zip(raw) {
            *adjusted = raw / params.temperature;
        }
        for entry in params.adjust.chunks_exact(ADJUST_BYTES) {
            let (id, multiply) = (number(entry, 0), f32::from_bits(number(entry, 1)));
            let add = f32::from_bits(number(entry, 2));
            if !(multiply.is_finite() && multiply > 0.0) || add.is_nan() || add == f32::INFINITY {
                fail!(
                    BadArgument,
                    "the adjustment of id {id} multiplies by {multiply} and adds {add}; expected a positive number, \
                     and a finite one or −∞"
                );
            }
            if let Some(index) = self.config.index(id) {
                let raw = raw[index];
                let multiplied = if raw > 0.0 { raw / multiply } else { raw * multiply };
                adjusted[index] = (multiplied + add) / params.temperature;
            }
        }
        for (adjusted, banned) in adjusted.iter_mut().zip(&self.banned) {
            if *banned {
                *adjusted = f32::NEG_INFINITY;
            }
        }
        if let Some(index) = adjusted.iter().position(|value| value.is_nan() || *value == f32::INFINITY) {
            let id = self.config.vocab_start as usize + index;
            fail!(
                NonFinite,
                "the adjusted logit of token {id} is {}: its logit is {} at temperature {}",
                adjusted[index],
                raw[index],
                params.temperature
            );
        }
        Ok(())
    }

    /// Writes what ids are ranked by: their adjusted logits, with noise when there is a seed.
    fn rank_by(&self, seed: Option<u64>, adjusted: &[f32], keys: &mut [f32]) {
        for ((key, adjusted), id) in keys.iter_mut().zip(adjusted).zip(self.config.vocab_start..) {
            *key = match seed {
                Some(seed) if adjusted.is_finite() => (f64::from(*adjusted) + noise(seed, id)) as f32,
                _ => *adjusted,
            };
        }
    }

    fn own_index(&self, what: &str, id: u32) -> Result<usize> {
        match self.config.index(id) {
            Some(index) => Ok(index),
            None => fail!(
                BadArgument,
                "{what} {id} is not this shard's, which owns {} to {}",
                self.config.vocab_start,
                self.config.vocab_end
            ),
        }
    }
}

/// Puts the places of the `count` largest keys at the start of `order`, largest first and the lower id first
/// among equals; returns how many there are, since −∞ is never selected.
fn best(keys: &[f32], order: &mut [u32], count: usize) -> usize {
    let mut eligible = 0;
    for (index, key) in keys.iter().enumerate() {
        if *key != f32::NEG_INFINITY {
            order[eligible] = index as u32;
            eligible += 1;
        }
    }
    let rank = |a: &u32, b: &u32| {
        let (x, y) = (keys[*a as usize], keys[*b as usize]);
        y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let order = &mut order[..eligible];
    let found = count.min(eligible);
    if 0 < found && found < eligible {
        order.select_nth_unstable_by(found - 1, rank);
    }
    order[..found].sort_unstable_by(rank);
    found
}

/// `ln Σ exp(value)` in f64, values in rising order of id; −∞ when all of them are.
fn log_sum_exp(values: &[f32]) -> f64 {
    let largest = values.iter().fold(f32::NEG_INFINITY, |largest, value| largest.max(*value));
    if largest == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let largest = f64::from(largest);
    // A few at a time, so that the exponentials are SIMD instructions; the sum stays in order.
    let mut sum = 0.0;
    let mut powers = [0.0; 64];
    for values in values.chunks(powers.len()) {
        for (power, value) in powers.iter_mut().zip(values) {
            *power = exp_of_negative(f64::from(*value) - largest);
        }
        sum = powers[..values.len()].iter().fold(sum, |sum, power| sum + power);
    }
    largest + libm::log(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_id() {
        let keys = [1.0, 3.0, f32::NEG_INFINITY, 3.0, -0.0, 0.0, 2.0];
        let mut order = [0; 7];
        for count in 0..10 {
            let found = best(&keys, &mut order, count);
            assert_eq!(order[..found], [1, 3, 6, 0, 4, 5][..count.min(6)]);
        }
    }

    #[test]
    fn log_sum_exp_neither_overflows_nor_vanishes() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-12);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY, -5.0]), -5.0);
    }
}
