//! Byte-pair merging over ids: the table of merges, and a word's merging in rank order.

use crate::{Result, fail};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const ID_BITS: u32 = 21;
const RANK_BITS: u32 = 64 - 2 * ID_BITS;

/// Ids are below this: three numbers of a merge share 64 bits of the table.
pub(super) const MAX_TOKENS: usize = 1 << ID_BITS;

/// Ranks are below this. The largest 22-bit number marks an empty place in the table.
pub(super) const MAX_MERGES: usize = (1 << RANK_BITS) - 1;

/// The rank of two tokens that do not merge.
const NO_RANK: u32 = u32::MAX;

/// The rank of a place inside a symbol.
const INSIDE: u32 = u32::MAX - 1;

/// From this many symbols on a word is merged with a queue, below by looking at every pair.
const QUEUE_FROM: usize = 40;

const EMPTY: u64 = u64::MAX;

/// The merges as an open-addressing table of `left | right | rank`, and their results by rank.
pub(super) struct Merges {
    table: Vec<u64>,
    shift: u32,
    results: Vec<u32>,
}

impl Merges {
    /// A table for `count` merges, at most two thirds full.
    pub(super) fn with_capacity(count: usize) -> Result<Self> {
        let places = (count.max(1) + count / 2 + 1).next_power_of_two();
        let mut table = Vec::new();
        let mut results = Vec::new();
        if table.try_reserve_exact(places).is_err() || results.try_reserve_exact(count).is_err() {
            fail!(OverBudget, "the host could not provide memory for {count} merges");
        }
        table.resize(places, EMPTY);
        Ok(Self { table, shift: 64 - places.trailing_zeros(), results })
    }

    /// Adds the merge of the next rank. All ids are below [`MAX_TOKENS`].
    pub(super) fn push(&mut self, left: u32, right: u32, result: u32) -> Result<()> {
        let rank = self.results.len();
        if rank >= MAX_MERGES {
            fail!(BadData, "more than {MAX_MERGES} merges");
        }
        let place = self.place(left, right);
        match self.table.get_mut(place) {
            Some(entry) if *entry == EMPTY => *entry = key(left, right) << RANK_BITS | rank as u64,
            _ => fail!(BadData, "merge {rank}, of the tokens {left} and {right}, is there already"),
        }
        self.results.push(result);
        Ok(())
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.table.capacity() * 8 + self.results.capacity() * 4
    }

    /// The place of a pair: where it is, or the empty one where it would be.
    fn place(&self, left: u32, right: u32) -> usize {
        let wanted = key(left, right);
        let mask = self.table.len() - 1;
        let mut place = (wanted.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (self.shift & 63)) as usize & mask;
        while self.table.get(place).is_some_and(|entry| *entry != EMPTY && entry >> RANK_BITS != wanted) {
            place = (place + 1) & mask;
        }
        place
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        match self.table.get(self.place(left, right)) {
            Some(entry) if *entry != EMPTY => (entry & MAX_MERGES as u64) as u32,
            _ => NO_RANK,
        }
    }

    fn result(&self, rank: u32) -> u32 {
        self.results.get(rank as usize).copied().unwrap_or(0)
    }

    /// Merges a word's symbols, lowest rank and then leftmost first, and appends what remains.
    pub(super) fn merge(&self, word: &mut Word, out: &mut Vec<u32>) {
        if word.ids.len() < QUEUE_FROM {
            self.merge_short(word, out);
        } else {
            self.merge_long(word, out);
        }
    }

    fn merge_short(&self, word: &mut Word, out: &mut Vec<u32>) {
        let Word { ids, ranks } = word;
        ranks.clear();
        ranks.extend(ids.windows(2).map(|pair| self.rank(pair[0], pair[1])));
        // `min_by_key` takes the first of equals: the leftmost.
        while let Some((at, rank)) = ranks.iter().copied().enumerate().min_by_key(|(_, rank)| *rank) {
            if rank == NO_RANK {
                break;
            }
            ids[at] = self.result(rank);
            ids.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = self.rank(ids[at - 1], ids[at]);
            }
            if at < ranks.len() {
                ranks[at] = self.rank(ids[at], ids[at + 1]);
            }
        }
        out.extend_from_slice(ids);
    }

    /// The same with a queue: n log n for any word.
    fn merge_long(&self, word: &mut Word, out: &mut Vec<u32>) {
        let Word { ids, ranks } = word;
        let count = ids.len();
        ranks.clear();
        ranks.reserve_exact(count);
        ranks.extend(ids.windows(2).map(|pair| self.rank(pair[0], pair[1])));
        ranks.resize(count, NO_RANK);
        let mut queue = Queue::new(ranks);
        while let Some((rank, at)) = queue.pop() {
            // An entry whose pair has changed since: its rank is another now.
            if ranks[at] != rank {
                continue;
            }
            let gone = next(ids, ranks, at);
            let after = next(ids, ranks, gone);
            ranks[gone] = INSIDE;
            ids[at] = self.result(rank);
            let length = (after - at) as u32;
            for inside in [at + 1, after - 1] {
                ranks[inside] = INSIDE;
                ids[inside] = length;
            }
            let before = previous(ids, ranks, at);
            for (left, right) in [(before, Some(at)), (Some(at), (after < count).then_some(after))] {
                let Some(left) = left else { continue };
                ranks[left] = right.map_or(NO_RANK, |right| self.rank(ids[left], ids[right]));
                if ranks[left] != NO_RANK {
                    queue.push(ranks[left], left as u32, ranks);
                }
            }
        }
        let mut at = 0;
        while at < count {
            out.push(ids[at]);
            at = next(ids, ranks, at);
        }
    }
}

/// Where the symbol after the one at `at` starts. A symbol of several places has [`INSIDE`] as the
/// rank, and its length as the id, of its second and its last place: no links are needed.
fn next(ids: &[u32], ranks: &[u32], at: usize) -> usize {
    if ranks.get(at + 1) == Some(&INSIDE) { at + ids[at + 1] as usize } else { at + 1 }
}

/// Where the symbol before the one at `at` starts.
fn previous(ids: &[u32], ranks: &[u32], at: usize) -> Option<usize> {
    let last = at.checked_sub(1)?;
    if ranks[last] == INSIDE { at.checked_sub(ids[last] as usize) } else { Some(last) }
}

/// Pairs that may merge, by rank and then place. A pair whose rank has changed since is still in it.
struct Queue(BinaryHeap<Reverse<u64>>);

impl Queue {
    /// All pairs of a word. There is room for half as many again: see [`Self::push`].
    fn new(ranks: &[u32]) -> Self {
        let mut queue = Self(BinaryHeap::with_capacity(ranks.len() + ranks.len() / 2 + 1));
        queue.fill(ranks);
        queue
    }

    fn fill(&mut self, ranks: &[u32]) {
        let mut entries = std::mem::take(&mut self.0).into_vec();
        entries.clear();
        let pairs = ranks.iter().zip(0u64..).filter(|(rank, _)| **rank < INSIDE);
        entries.extend(pairs.map(|(rank, at)| Reverse(u64::from(*rank) << 32 | at)));
        self.0 = BinaryHeap::from(entries);
    }

    fn pop(&mut self) -> Option<(u32, usize)> {
        self.0.pop().map(|Reverse(entry)| ((entry >> 32) as u32, entry as u32 as usize))
    }

    /// Adds a pair that `ranks` has already. When the queue is full, what is out of date goes first: each
    /// merge adds one entry more than it takes and ends one symbol, so that by then a third is gone.
    fn push(&mut self, rank: u32, at: u32, ranks: &[u32]) {
        if self.0.len() == self.0.capacity() {
            self.fill(ranks);
        } else {
            self.0.push(Reverse(u64::from(rank) << 32 | u64::from(at)));
        }
    }
}

/// A word being merged, and the working memory that the next word uses again.
#[derive(Default)]
pub(super) struct Word {
    /// The word's symbols.
    pub(super) ids: Vec<u32>,
    ranks: Vec<u32>,
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << ID_BITS | u64::from(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Symbols 0..n; merging ranks are the order given.
    fn table(merges: &[(u32, u32, u32)]) -> Merges {
        let mut table = Merges::with_capacity(merges.len()).unwrap();
        for (left, right, result) in merges {
            table.push(*left, *right, *result).unwrap();
        }
        table
    }

    fn both_ways(merges: &Merges, ids: &[u32]) -> Vec<u32> {
        let (mut short, mut long) = (Vec::new(), Vec::new());
        merges.merge_short(&mut Word { ids: ids.to_vec(), ..Word::default() }, &mut short);
        merges.merge_long(&mut Word { ids: ids.to_vec(), ..Word::default() }, &mut long);
        assert_eq!(short, long, "{ids:?}");
        short
    }

    #[test]
    fn the_lowest_rank_goes_first_and_the_leftmost_of_equals() {
        // a b c; "bc" before "ab"; "aa" overlaps itself.
        let merges = table(&[(1, 2, 3), (0, 1, 4), (0, 0, 5), (5, 0, 6)]);
        assert_eq!(both_ways(&merges, &[0, 1, 2]), [0, 3]);
        assert_eq!(both_ways(&merges, &[0, 1, 1]), [4, 1]);
        assert_eq!(both_ways(&merges, &[0, 0, 0]), [6]);
        assert_eq!(both_ways(&merges, &[0, 0, 0, 0, 0]), [5, 6]);
        assert_eq!(both_ways(&merges, &[2]), [2]);
        assert!(both_ways(&merges, &[]).is_empty());
    }

    #[test]
    fn the_queue_and_the_scan_agree_on_many_words() {
        let mut merges = Vec::new();
        for left in 0..4u32 {
            for right in 0..4u32 {
                if (left * 7 + right * 3) % 4 != 0 {
                    merges.push((left, right, 4 + merges.len() as u32));
                }
            }
        }
        for result in 4..12 {
            merges.push((result, result % 4, 30 + result));
            merges.push((result % 4, result, 50 + result));
            merges.push((result, result + 1, 70 + result));
        }
        let merges = table(&merges);
        let mut seed = 1u32;
        for length in 1..120 {
            let word: Vec<u32> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    seed >> 30
                })
                .collect();
            both_ways(&merges, &word);
        }
    }

    #[test]
    fn a_merge_given_twice_is_refused() {
        let mut merges = table(&[(1, 2, 3)]);
        assert_eq!(merges.push(1, 2, 4).unwrap_err().kind, crate::Kind::BadData);
    }

    #[test]
    fn a_table_of_no_merges_merges_nothing() {
        assert_eq!(both_ways(&table(&[]), &[7, 7, 7]), [7, 7, 7]);
    }
}
