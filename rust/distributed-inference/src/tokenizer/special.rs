//! Tokens that are matched as a whole: leftmost first, the longest of those that start there.

use super::section::{Kind, Section};
use crate::{Result, fail};

/// The whole-word tokens of a section, sorted by their bytes.
pub(super) struct Specials {
    sorted: Vec<u32>,
    /// Whether some token starts with the byte.
    starts: [bool; 256],
}

impl Specials {
    /// Collects them; each must be valid UTF-8, and no two may be the same.
    pub(super) fn collect(section: &Section) -> Result<Self> {
        let mut sorted = Vec::new();
        let mut starts = [false; 256];
        for id in 0..section.n_tokens as u32 {
            if !matches!(section.kind(id), Kind::Control | Kind::UserDefined) {
                continue;
            }
            let text = section.token(id)?;
            if std::str::from_utf8(text).is_err() {
                fail!(BadData, "special token {id} is not valid UTF-8");
            }
            starts[usize::from(text[0])] = true;
            sorted.push(id);
        }
        sorted.sort_by(|a, b| text(section, *a).cmp(text(section, *b)));
        if let Some(pair) = sorted.windows(2).find(|pair| text(section, pair[0]) == text(section, pair[1])) {
            fail!(BadData, "special tokens {} and {} are the same text", pair[0], pair[1]);
        }
        Ok(Self { sorted, starts })
    }

    /// The first token in `haystack`: where it starts, where it ends and its id.
    pub(super) fn find(
        &self,
        section: &Section,
        haystack: &str,
        control: bool,
    ) -> Option<(usize, usize, u32)> {
        let bytes = haystack.as_bytes();
        (0..bytes.len())
            .filter(|at| self.starts[usize::from(bytes[*at])])
            .find_map(|at| self.at(section, &bytes[at..], control).map(|(length, id)| (at, at + length, id)))
    }

    /// The longest token that `bytes` starts with.
    fn at(&self, section: &Section, bytes: &[u8], control: bool) -> Option<(usize, u32)> {
        let mut candidates = &self.sorted[..];
        let mut found = None;
        for (depth, byte) in bytes.iter().enumerate() {
            // Sorted by bytes, those that go on with `byte` lie together.
            let first = candidates.partition_point(|id| text(section, *id).get(depth) < Some(byte));
            let after = candidates.partition_point(|id| text(section, *id).get(depth) <= Some(byte));
            candidates = &candidates[first..after];
            let Some(shortest) = candidates.first().copied() else { return found };
            if text(section, shortest).len() == depth + 1
                && (control || section.kind(shortest) == Kind::UserDefined)
            {
                found = Some((depth + 1, shortest));
            }
            if candidates.len() == 1 && text(section, shortest).len() == depth + 1 {
                return found;
            }
        }
        found
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.sorted.capacity() * 4 + self.starts.len()
    }
}

fn text(section: &Section, id: u32) -> &[u8] {
    section.token(id).unwrap_or_default()
}
