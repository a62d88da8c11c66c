//! Text out of bytes that arrive in pieces.

/// Decodes a stream of bytes as UTF-8 and holds back a character until it is whole.
///
/// Bytes that cannot be part of any character become U+FFFD, one for each longest part of a
/// character (the practice of the Unicode Standard, §3.9), as soon as that is certain.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    held: Vec<u8>,
}

impl StreamDecoder {
    /// Takes the next bytes; appends the text that is certain now.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.held.extend_from_slice(bytes);
        let kept = decode(&self.held, out);
        self.held.drain(..self.held.len() - kept);
    }

    /// Ends the stream: an unfinished character becomes U+FFFD. The decoder starts anew.
    pub fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.held.clear();
        }
    }

    /// Bytes held back: 3 at most.
    pub fn held(&self) -> usize {
        self.held.len()
    }
}

/// Appends `bytes` as text, but for an unfinished character at the end, whose bytes it counts.
pub(super) fn decode(bytes: &[u8], out: &mut String) -> usize {
    let mut rest = bytes;
    loop {
        let error = match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return 0;
            }
            Err(error) => error,
        };
        let (valid, after) = rest.split_at(error.valid_up_to());
        out.push_str(std::str::from_utf8(valid).unwrap_or_default());
        let Some(length) = error.error_len() else { return after.len() };
        out.push(char::REPLACEMENT_CHARACTER);
        rest = &after[length..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(pieces: &[&[u8]]) -> Vec<String> {
        let mut decoder = StreamDecoder::default();
        let mut deltas = Vec::new();
        for piece in pieces {
            let mut delta = String::new();
            decoder.push(piece, &mut delta);
            deltas.push(delta);
        }
        let mut last = String::new();
        decoder.finish(&mut last);
        deltas.push(last);
        deltas
    }

    #[test]
    fn a_character_comes_whole_however_it_is_cut() {
        let text = "a€🚀é";
        for cut in 1..4 {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(cut).collect();
            let deltas = stream(&pieces);
            assert_eq!(deltas.concat(), text);
            assert!(deltas.iter().all(|delta| !delta.contains('\u{fffd}')), "{deltas:?}");
        }
        assert_eq!(stream(&[b"\xf0\x9f", b"\x9a", b"\x80!"]), ["", "", "🚀!", ""]);
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_as_soon_as_that_is_certain() {
        assert_eq!(stream(&[b"a\xffb", b"\xf0\x9f", b"c"]), ["a\u{fffd}b", "", "\u{fffd}c", ""]);
        assert_eq!(stream(&[b"\xe2\x82"]), ["", "\u{fffd}"]);
        assert_eq!(stream(&[b"\xed\xa0\x80"]), ["\u{fffd}\u{fffd}\u{fffd}", ""]);
    }

    #[test]
    fn whole_and_streamed_text_are_the_same_for_any_bytes() {
        let mut seed = 7u32;
        for length in 0..200 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let byte = (seed >> 24) as u8;
                    if byte.is_multiple_of(3) { byte | 0x80 } else { byte }
                })
                .collect();
            let pieces: Vec<&[u8]> = bytes.chunks(2).collect();
            assert_eq!(stream(&pieces).concat(), String::from_utf8_lossy(&bytes), "{bytes:x?}");
        }
    }
}
