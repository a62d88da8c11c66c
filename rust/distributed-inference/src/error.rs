//! Errors that cross the ABI: a kind, which becomes the negative status, and a sentence.

use std::fmt;

/// What went wrong, as the host sees it: the call returns `-(kind as i32)`.
///
/// `engine/client.py` holds the same table; a test compares the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    /// An argument has a value that no caller should pass.
    BadArgument = 1,
    /// An offset or a length leaves the part of the region it belongs to.
    OutOfBounds = 2,
    /// A weight type, architecture or option that the engine does not compute.
    Unsupported = 3,
    /// More memory than the host's limit allows.
    OverBudget = 4,
    /// A call out of order: a block skipped, a phase not begun, a session not open.
    BadState = 5,
    /// A NaN or an infinity in an activation.
    NonFinite = 6,
    /// Data that contradicts itself (a tokenizer section, a digest).
    BadData = 7,
    /// A handle that names no engine.
    BadHandle = 8,
    /// A panic was caught at the boundary; the engine must be thrown away.
    Panic = 9,
}

/// An error of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind, for programs.
    pub kind: Kind,
    /// The sentence, for people: the thing, what was expected, what was found.
    pub message: String,
}

impl Error {
    /// Makes an error of `kind` that says `message`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns early with an [`Error`] of the given kind, formatted like `format!`.
#[macro_export]
macro_rules! fail {
    ($kind:ident, $($text:tt)*) => {
        return Err($crate::Error::new($crate::Kind::$kind, format!($($text)*)))
    };
}
