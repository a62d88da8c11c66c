//! The tokenizers and streams that a host holds by number.

use super::{EncodeOptions, StreamDecoder, Tokenizer};
use crate::{Result, fail};

/// A tokenizer of a host: its section as it arrives, then itself and the text and ids in transit.
enum Held {
    Arriving { section: Vec<u8>, expected: usize },
    Ready(Box<Ready>),
}

struct Ready {
    tokenizer: Tokenizer,
    text: Vec<u8>,
    ids: Vec<u32>,
    bytes: Vec<u8>,
}

struct Stream {
    tokenizer: u32,
    decoder: StreamDecoder,
}

/// The tokenizers that a host has loaded, and its streams of text.
#[derive(Default)]
pub struct Tokenizers {
    held: Vec<Option<Held>>,
    streams: Vec<Option<Stream>>,
}

impl Tokenizers {
    /// Makes room for a section of `bytes`; returns the tokenizer's number.
    pub fn create(&mut self, bytes: usize) -> Result<u32> {
        let mut section = Vec::new();
        if section.try_reserve_exact(bytes).is_err() {
            fail!(OverBudget, "the host could not provide {bytes} bytes for a tokenizer section");
        }
        Ok(put(&mut self.held, Held::Arriving { section, expected: bytes }))
    }

    /// Takes the next bytes of a section.
    pub fn append(&mut self, number: u32, bytes: &[u8]) -> Result<()> {
        match self.held.get_mut(number as usize) {
            Some(Some(Held::Arriving { section, expected })) => {
                if bytes.len() > *expected - section.len() {
                    fail!(
                        BadArgument,
                        "the tokenizer section was to have {expected} bytes, got {} and then {}",
                        section.len(),
                        bytes.len()
                    );
                }
                section.extend_from_slice(bytes);
                Ok(())
            }
            _ => fail!(BadState, "tokenizer {number} is not waiting for its section"),
        }
    }

    /// Makes the tokenizer of a section that has arrived; returns its number of tokens.
    ///
    /// After an error the number is free again.
    pub fn open(&mut self, number: u32) -> Result<u32> {
        let Some(place) = self.held.get_mut(number as usize) else {
            fail!(BadState, "there is no tokenizer {number}");
        };
        let section = match place.take() {
            Some(Held::Arriving { section, expected }) if section.len() == expected => section,
            Some(Held::Arriving { section, expected }) => {
                fail!(BadData, "the tokenizer section was to have {expected} bytes, got {}", section.len())
            }
            other => {
                *place = other;
                fail!(BadState, "tokenizer {number} is not waiting for its section");
            }
        };
        let tokenizer = Tokenizer::from_section(section)?;
        let n_tokens = tokenizer.n_tokens() as u32;
        *place = Some(Held::Ready(Box::new(Ready {
            tokenizer,
            text: Vec::new(),
            ids: Vec::new(),
            bytes: Vec::new(),
        })));
        Ok(n_tokens)
    }

    /// Drops a tokenizer and its streams.
    pub fn destroy(&mut self, number: u32) -> Result<()> {
        if self.held.get_mut(number as usize).and_then(Option::take).is_none() {
            fail!(BadState, "there is no tokenizer {number}");
        }
        for stream in &mut self.streams {
            if stream.as_ref().is_some_and(|stream| stream.tokenizer == number) {
                *stream = None;
            }
        }
        Ok(())
    }

    /// A tokenizer.
    pub fn get(&self, number: u32) -> Result<&Tokenizer> {
        match self.held.get(number as usize) {
            Some(Some(Held::Ready(ready))) => Ok(&ready.tokenizer),
            _ => fail!(BadState, "there is no tokenizer {number} with its section loaded"),
        }
    }

    fn ready(&mut self, number: u32) -> Result<&mut Ready> {
        match self.held.get_mut(number as usize) {
            Some(Some(Held::Ready(ready))) => Ok(ready),
            _ => fail!(BadState, "there is no tokenizer {number} with its section loaded"),
        }
    }

    /// Takes the next bytes of a text to encode.
    pub fn text(&mut self, number: u32, bytes: &[u8]) -> Result<()> {
        let text = &mut self.ready(number)?.text;
        if text.try_reserve(bytes.len()).is_err() {
            fail!(OverBudget, "the host could not provide {} bytes for a text", text.len() + bytes.len());
        }
        text.extend_from_slice(bytes);
        Ok(())
    }

    /// Encodes the text that has arrived and forgets it; returns the number of ids, kept for [`Self::ids`].
    pub fn encode(&mut self, number: u32, options: EncodeOptions) -> Result<u32> {
        let ready = self.ready(number)?;
        let text = std::mem::take(&mut ready.text);
        ready.ids = Vec::new();
        let Ok(text) = std::str::from_utf8(&text) else {
            fail!(BadArgument, "the text to encode is not valid UTF-8");
        };
        ready.ids = ready.tokenizer.encode(text, options);
        Ok(ready.ids.len() as u32)
    }

    /// The ids of the last text encoded.
    pub fn ids(&self, number: u32) -> Result<&[u32]> {
        match self.held.get(number as usize) {
            Some(Some(Held::Ready(ready))) => Ok(&ready.ids),
            _ => fail!(BadState, "there is no tokenizer {number} with its section loaded"),
        }
    }

    /// Decodes ids; returns the number of bytes, kept for [`Self::bytes`].
    pub fn decode(&mut self, number: u32, ids: impl Iterator<Item = u32>) -> Result<u32> {
        let ready = self.ready(number)?;
        ready.bytes.clear();
        for id in ids {
            ready.bytes.extend_from_slice(ready.tokenizer.token_bytes(id)?);
        }
        Ok(ready.bytes.len() as u32)
    }

    /// The bytes of the last ids decoded.
    pub fn bytes(&self, number: u32) -> Result<&[u8]> {
        match self.held.get(number as usize) {
            Some(Some(Held::Ready(ready))) => Ok(&ready.bytes),
            _ => fail!(BadState, "there is no tokenizer {number} with its section loaded"),
        }
    }

    /// Starts a stream of text; returns its number.
    pub fn stream(&mut self, number: u32) -> Result<u32> {
        self.get(number)?;
        Ok(put(&mut self.streams, Stream { tokenizer: number, decoder: StreamDecoder::default() }))
    }

    /// Takes the next token of a stream; returns the text that is certain now.
    pub fn push(&mut self, stream: u32, id: u32) -> Result<String> {
        let mut text = String::new();
        let Some(Some(held)) = self.streams.get_mut(stream as usize) else {
            fail!(BadState, "there is no stream {stream}");
        };
        match self.held.get(held.tokenizer as usize) {
            Some(Some(Held::Ready(ready))) => held.decoder.push(ready.tokenizer.token_bytes(id)?, &mut text),
            _ => fail!(BadState, "the tokenizer of stream {stream} is gone"),
        }
        Ok(text)
    }

    /// Ends a stream; returns what was held back, and frees its number.
    pub fn finish(&mut self, stream: u32) -> Result<String> {
        let Some(mut held) = self.streams.get_mut(stream as usize).and_then(Option::take) else {
            fail!(BadState, "there is no stream {stream}");
        };
        let mut text = String::new();
        held.decoder.finish(&mut text);
        Ok(text)
    }
}

/// Puts a value into the first free place; returns its number.
fn put<T>(places: &mut Vec<Option<T>>, value: T) -> u32 {
    let free = places.iter().position(Option::is_none).unwrap_or_else(|| {
        places.push(None);
        places.len() - 1
    });
    places[free] = Some(value);
    free as u32
}
