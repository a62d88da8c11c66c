//! The tokenizer: byte-level byte-pair encoding from the section that a knot carries.
//!
//! The same one serves every host. It never normalises: a host that wants NFC applies it first.

#![forbid(unsafe_code)]

mod merges;
mod pretokenize;
mod registry;
mod section;
mod special;
mod stream;
mod unicode;
#[rustfmt::skip]
mod unicode_tables;
mod words;

pub use pretokenize::PreTokenizer;
pub use registry::Tokenizers;
pub use stream::StreamDecoder;

use crate::{Result, fail};
use merges::{Merges, Word};
use section::{Kind, Section};
use special::Specials;
use words::Words;

const NO_TOKEN: u32 = u32::MAX;

/// How a text is to be read.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncodeOptions {
    /// Control tokens are matched in the text; otherwise their text is text like any other.
    pub allow_special: bool,
    /// Put the beginning-of-text token first (never twice): as the section says if `None`.
    pub add_bos: Option<bool>,
}

/// A vocabulary, its merges and its pre-tokenizer. Immutable once made.
pub struct Tokenizer {
    section: Section,
    merges: Merges,
    specials: Specials,
    /// Whole words, where the vocabulary's family takes them before any merging.
    words: Option<Words>,
    bytes: [u32; 256],
}

impl Tokenizer {
    /// Makes a tokenizer from a knot's tokenizer section, checked whole: any bytes give a tokenizer
    /// that works or an error of kind `BadData`, `Unsupported` or `OverBudget`.
    pub fn from_section(section: impl Into<Vec<u8>>) -> Result<Self> {
        let section = Section::parse(section.into())?;
        let mut merges = Merges::with_capacity(section.n_merges)?;
        for rank in 0..section.n_merges {
            let [left, right, result] = section.merge(rank)?;
            merges.push(left, right, result)?;
        }
        let mut bytes = [NO_TOKEN; 256];
        for id in 0..section.n_tokens as u32 {
            if let ([byte], Kind::Normal) = (section.token(id)?, section.kind(id)) {
                let place = &mut bytes[usize::from(*byte)];
                if *place != NO_TOKEN {
                    fail!(BadData, "tokens {place} and {id} are both the byte {byte:#04x}");
                }
                *place = id;
            }
        }
        let specials = Specials::collect(&section)?;
        let words = if section.ignore_merges { Some(Words::collect(&section)?) } else { None };
        Ok(Self { section, merges, specials, words, bytes })
    }

    /// Tokens in the vocabulary; ids are below it.
    pub fn n_tokens(&self) -> usize {
        self.section.n_tokens
    }

    /// Bytes of memory held at rest.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.section.memory_bytes()
            + self.merges.memory_bytes()
            + self.specials.memory_bytes()
            + self.words.as_ref().map_or(0, Words::memory_bytes)
    }

    /// The ids of a text.
    ///
    /// Bytes for which the vocabulary has no token are dropped, as its own library does.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        let mut out = Vec::new();
        let mut word = Word::default();
        let mut rest = text;
        while let Some((start, end, id)) = self.specials.find(&self.section, rest, options.allow_special) {
            self.encode_plain(&rest[..start], &mut word, &mut out);
            out.push(id);
            rest = &rest[end..];
        }
        self.encode_plain(rest, &mut word, &mut out);
        if options.add_bos.unwrap_or(self.section.add_bos)
            && let Some(bos) = self.section.bos
            && out.first() != Some(&bos)
        {
            out.insert(0, bos);
        }
        if options.add_bos.is_none()
            && self.section.add_eos
            && let Some(eos) = self.section.eos
            && out.last() != Some(&eos)
        {
            out.push(eos);
        }
        out
    }

    fn encode_plain(&self, text: &str, word: &mut Word, out: &mut Vec<u32>) {
        pretokenize::split(self.section.pre, text, |piece| {
            if let Some(id) =
                self.words.as_ref().and_then(|words| words.find(&self.section, piece.as_bytes()))
            {
                out.push(id);
                return;
            }
            word.ids.clear();
            word.ids.reserve(piece.len());
            word.ids
                .extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)]).filter(|id| *id != NO_TOKEN));
            self.merges.merge(word, out);
        });
    }

    /// The bytes of one token: not always whole characters.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8]> {
        self.section.token(id)
    }

    /// The bytes of a sequence of tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for id in ids {
            out.extend_from_slice(self.section.token(*id)?);
        }
        Ok(out)
    }
}
