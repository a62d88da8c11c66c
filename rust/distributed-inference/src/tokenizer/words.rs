//! Normal tokens by their bytes, for families that take a whole word before any merging.

use super::section::{Kind, Section};
use crate::{Result, fail};
use xxhash_rust::xxh3::xxh3_64;

const EMPTY: u32 = u32::MAX;

/// Ids in an open-addressing table; the bytes stay in the section.
pub(super) struct Words {
    table: Vec<u32>,
}

impl Words {
    /// Collects a section's normal tokens.
    pub(super) fn collect(section: &Section) -> Result<Self> {
        let places = (section.n_tokens + section.n_tokens / 2 + 1).next_power_of_two();
        let mut table = Vec::new();
        if table.try_reserve_exact(places).is_err() {
            fail!(OverBudget, "the host could not provide memory for {} words", section.n_tokens);
        }
        table.resize(places, EMPTY);
        let mut words = Self { table };
        for id in 0..section.n_tokens as u32 {
            if section.kind(id) != Kind::Normal {
                continue;
            }
            let place = words.place(section, section.token(id)?);
            match words.table.get_mut(place) {
                Some(entry) if *entry == EMPTY => *entry = id,
                _ => fail!(BadData, "token {id} is a duplicate of an earlier one"),
            }
        }
        Ok(words)
    }

    /// The normal token that is exactly these bytes.
    pub(super) fn find(&self, section: &Section, bytes: &[u8]) -> Option<u32> {
        self.table.get(self.place(section, bytes)).copied().filter(|id| *id != EMPTY)
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.table.capacity() * 4
    }

    fn place(&self, section: &Section, bytes: &[u8]) -> usize {
        let mask = self.table.len() - 1;
        let mut place = xxh3_64(bytes) as usize & mask;
        while self.table.get(place).is_some_and(|id| *id != EMPTY && section.token(*id).ok() != Some(bytes)) {
            place = (place + 1) & mask;
        }
        place
    }
}
