//! The tokenizer section of a knot, kept as the bytes it came in; `docs/tokenizer.md` has the layout.

use super::merges::{MAX_MERGES, MAX_TOKENS};
use super::pretokenize::PreTokenizer;
use crate::{Result, fail};
use std::ops::Range;

const MAGIC: &[u8; 4] = b"KTOK";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 32;
const NO_ID: u32 = u32::MAX;

/// The longest token, in bytes.
pub(super) const MAX_TOKEN_BYTES: usize = 16_384;

/// What a token is for, with GGUF's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Found by merging.
    Normal,
    /// Matched as a whole, where the caller allows it.
    Control,
    /// Matched as a whole, always.
    UserDefined,
    /// In no text.
    Unused,
}

/// A section whose lengths, ids, offsets and types have been checked.
pub(super) struct Section {
    bytes: Vec<u8>,
    pub(super) pre: PreTokenizer,
    pub(super) ignore_merges: bool,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
    pub(super) n_tokens: usize,
    pub(super) n_merges: usize,
    offsets: usize,
    merges: usize,
    types: usize,
    blob: usize,
}

impl Section {
    /// Checks everything but the merges' results.
    pub(super) fn parse(bytes: Vec<u8>) -> Result<Self> {
        if bytes.len() < HEADER_BYTES {
            fail!(BadData, "a tokenizer section has {HEADER_BYTES} bytes at least, got {}", bytes.len());
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if !bytes.starts_with(MAGIC) || version != VERSION {
            fail!(
                BadData,
                "a tokenizer section starts with KTOK and version {VERSION}, found {:02x?} and {version}",
                &bytes[..4]
            );
        }
        let pre = match bytes[6] {
            1 => PreTokenizer::Qwen2,
            2 => PreTokenizer::SmolLm,
            3 => PreTokenizer::LlamaBpe,
            other => fail!(Unsupported, "pre-tokenizer {other}: this engine has 1, 2 and 3"),
        };
        let flags = bytes[7];
        if flags > 7 {
            fail!(BadData, "tokenizer flags are {flags:#x}, expected 0 to 7");
        }
        let [info, n_tokens, n_merges, blob_bytes, bos, eos] =
            [8, 12, 16, 20, 24, 28].map(|at| read_u32(&bytes, at));
        let (n_tokens, n_merges) = (n_tokens as usize, n_merges as usize);
        if n_tokens == 0 || n_tokens > MAX_TOKENS || n_merges > MAX_MERGES {
            fail!(
                BadData,
                "{n_tokens} tokens and {n_merges} merges, expected 1 to {MAX_TOKENS} and at most {MAX_MERGES}"
            );
        }
        // In 64 bits nothing below overflows: every count is at most 32 bits wide.
        let expected = HEADER_BYTES as u64
            + u64::from(info)
            + 4 * (n_tokens as u64 + 1)
            + 12 * n_merges as u64
            + n_tokens as u64
            + u64::from(blob_bytes);
        if expected != bytes.len() as u64 {
            fail!(BadData, "the tokenizer section has {} bytes, its header says {expected}", bytes.len());
        }
        let id = |role: &str, id: u32| match id {
            NO_ID => Ok(None),
            id if (id as usize) < n_tokens => Ok(Some(id)),
            id => fail!(BadData, "{role} is token {id}, outside the {n_tokens} tokens"),
        };
        let (bos, eos) = (id("bos", bos)?, id("eos", eos)?);
        let (add_bos, add_eos) = (flags & 2 != 0, flags & 4 != 0);
        if (add_bos && bos.is_none()) || (add_eos && eos.is_none()) {
            fail!(BadData, "bos or eos is to be added to every text, but the section names none");
        }
        let offsets = HEADER_BYTES + info as usize;
        let merges = offsets + 4 * (n_tokens + 1);
        let types = merges + 12 * n_merges;
        let blob = types + n_tokens;
        let section = Self {
            bytes,
            pre,
            ignore_merges: flags & 1 != 0,
            bos,
            eos,
            add_bos,
            add_eos,
            n_tokens,
            n_merges,
            offsets,
            merges,
            types,
            blob,
        };
        section.check_tokens(blob_bytes)?;
        Ok(section)
    }

    fn check_tokens(&self, blob_bytes: u32) -> Result<()> {
        let mut end = self.offset(0);
        if end != 0 || self.offset(self.n_tokens) != blob_bytes {
            fail!(BadData, "the tokens' offsets do not span their {blob_bytes} bytes");
        }
        for id in 0..self.n_tokens {
            let start = end;
            end = self.offset(id + 1);
            if end <= start || (end - start) as usize > MAX_TOKEN_BYTES || end > blob_bytes {
                fail!(BadData, "token {id} is bytes {start} to {end}, expected 1 to {MAX_TOKEN_BYTES} bytes");
            }
            let kind = self.bytes[self.types + id];
            if !(1..=5).contains(&kind) {
                fail!(BadData, "token {id} has type {kind}, expected 1 to 5");
            }
        }
        Ok(())
    }

    fn offset(&self, id: usize) -> u32 {
        read_u32(&self.bytes, self.offsets + 4 * id)
    }

    fn range(&self, id: u32) -> Option<Range<usize>> {
        let id = id as usize;
        (id < self.n_tokens)
            .then(|| self.blob + self.offset(id) as usize..self.blob + self.offset(id + 1) as usize)
    }

    /// A token's bytes.
    pub(super) fn token(&self, id: u32) -> Result<&[u8]> {
        match self.range(id).and_then(|range| self.bytes.get(range)) {
            Some(bytes) => Ok(bytes),
            None => fail!(BadArgument, "token {id} is outside the vocabulary of {} tokens", self.n_tokens),
        }
    }

    /// What a token is for. The id is inside the vocabulary.
    pub(super) fn kind(&self, id: u32) -> Kind {
        match self.bytes.get(self.types + id as usize) {
            Some(1) => Kind::Normal,
            Some(2 | 3) => Kind::Control,
            Some(4) => Kind::UserDefined,
            _ => Kind::Unused,
        }
    }

    /// Left, right and result of the merge of a rank below `n_merges`, checked against the tokens' bytes.
    pub(super) fn merge(&self, rank: usize) -> Result<[u32; 3]> {
        let at = self.merges + 12 * rank;
        let merge = [at, at + 4, at + 8].map(|at| read_u32(&self.bytes, at));
        let parts = merge.map(|id| self.range(id).and_then(|range| self.bytes.get(range)));
        let [Some(left), Some(right), Some(result)] = parts else {
            fail!(BadData, "merge {rank} names the tokens {merge:?} of {}", self.n_tokens);
        };
        if result.strip_prefix(left) != Some(right) {
            fail!(
                BadData,
                "merge {rank}: token {} is not token {} and then token {}",
                merge[2],
                merge[0],
                merge[1]
            );
        }
        Ok(merge)
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
    }
}

/// The little-endian number at `at`; 0 past the end, where no checked section reads.
fn read_u32(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at + 4) {
        Some(&[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    }
}
