//! Tokenizers behind the ABI: sections and texts go in, ids and bytes come out, in pieces that fit
//! the mailbox. A tokenizer needs no arena.

use super::abi;
use crate::tokenizer::EncodeOptions;
use crate::{Result, fail};

/// `length` of `items` from `from` on, or an error that names `what`.
fn part<'a, T>(what: &str, items: &'a [T], from: u32, length: u32) -> Result<&'a [T]> {
    let range = from as usize..(from as usize).saturating_add(length as usize);
    match items.get(range) {
        Some(part) => Ok(part),
        None => fail!(OutOfBounds, "{what}: {length} from {from} on leave the {} there are", items.len()),
    }
}

abi! {
    /// Makes a tokenizer that waits for a section of `bytes`; returns its number.
    fn tok_create(engine, bytes) {
        if bytes as usize > engine.limit {
            fail!(OverBudget, "a tokenizer section of {bytes} bytes, more than the limit of {}", engine.limit);
        }
        engine.tokenizers.create(bytes as usize)
    }

    /// Takes the next `length` bytes of a tokenizer's section.
    fn tok_append(engine, tokenizer, bytes_at, length) {
        let bytes = engine.region.slice("tokenizer section", bytes_at, length)?;
        engine.tokenizers.append(tokenizer, bytes)?;
        Ok(0)
    }

    /// Reads the section that has arrived; returns the number of tokens. After an error the tokenizer is gone.
    fn tok_open(engine, tokenizer) {
        engine.tokenizers.open(tokenizer)
    }

    /// Drops a tokenizer and its streams.
    fn tok_destroy(engine, tokenizer) {
        engine.tokenizers.destroy(tokenizer)?;
        Ok(0)
    }

    /// Bytes of memory that a tokenizer holds, beside the region.
    fn tok_memory(engine, tokenizer) {
        Ok(engine.tokenizers.get(tokenizer)?.memory_bytes() as u32)
    }

    /// Takes the next `length` bytes of a text to encode.
    fn tok_text(engine, tokenizer, bytes_at, length) {
        let bytes = engine.region.slice("text", bytes_at, length)?;
        engine.tokenizers.text(tokenizer, bytes)?;
        Ok(0)
    }

    /// Encodes the text that has arrived (UTF-8) and forgets it; returns the number of ids, for `tok_ids`.
    ///
    /// `flags`: 1 control tokens are honoured, 2 the next bit decides about BOS (instead of the section), 4 BOS.
    fn tok_encode(engine, tokenizer, flags) {
        if flags > 7 {
            fail!(BadArgument, "encode flags are {flags}, expected 0 to 7");
        }
        let add_bos = (flags & 2 != 0).then_some(flags & 4 != 0);
        engine.tokenizers.encode(tokenizer, EncodeOptions { allow_special: flags & 1 != 0, add_bos })
    }

    /// Copies `count` ids (u32) from the `from`th on of the last text encoded; returns the bytes.
    fn tok_ids(engine, tokenizer, from, count, out_at) {
        let ids = part("ids", engine.tokenizers.ids(tokenizer)?, from, count)?;
        let out = engine.region.slice_mut("ids", out_at, count.saturating_mul(4))?;
        for (place, id) in out.chunks_exact_mut(4).zip(ids) {
            place.copy_from_slice(&id.to_le_bytes());
        }
        Ok(count.saturating_mul(4))
    }

    /// Decodes `count` ids (u32); returns the number of bytes, for `tok_bytes`.
    fn tok_decode(engine, tokenizer, ids_at, count) {
        let ids = engine.region.slice("ids", ids_at, count.saturating_mul(4))?;
        let ids = ids.chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]));
        engine.tokenizers.decode(tokenizer, ids)
    }

    /// Copies `length` bytes from the `from`th on of the last ids decoded; returns the bytes.
    fn tok_bytes(engine, tokenizer, from, length, out_at) {
        let bytes = part("bytes", engine.tokenizers.bytes(tokenizer)?, from, length)?;
        engine.region.slice_mut("bytes", out_at, length)?.copy_from_slice(bytes);
        Ok(length)
    }

    /// Starts a stream of a tokenizer's text; returns its number.
    fn tok_stream_create(engine, tokenizer) {
        engine.tokenizers.stream(tokenizer)
    }

    /// Takes the next token of a stream; writes the text that is certain now (UTF-8) and returns its bytes.
    fn tok_stream_push(engine, stream, id, out_at) {
        let text = engine.tokenizers.push(stream, id)?;
        engine.region.slice_mut("text", out_at, text.len() as u32)?.copy_from_slice(text.as_bytes());
        Ok(text.len() as u32)
    }

    /// Ends a stream and frees its number; writes what was held back and returns its bytes.
    fn tok_stream_finish(engine, stream, out_at) {
        let text = engine.tokenizers.finish(stream)?;
        engine.region.slice_mut("text", out_at, text.len() as u32)?.copy_from_slice(text.as_bytes());
        Ok(text.len() as u32)
    }
}
