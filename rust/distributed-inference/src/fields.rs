//! Reads the little-endian 4-byte fields of configurations and tables.

use crate::{Result, fail};

/// Bytes that are read field by field; every error names what they are.
pub struct Fields<'a> {
    what: &'static str,
    rest: &'a [u8],
    read: usize,
}

impl<'a> Fields<'a> {
    /// Fields of `what`, from its first byte on.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes, read: 0 }
    }

    /// The next field as an integer.
    pub fn u32(&mut self) -> Result<u32> {
        let Some((field, rest)) = self.rest.split_first_chunk::<4>() else {
            fail!(BadArgument, "{} ends after {} bytes, in the middle of a field", self.what, self.read);
        };
        self.rest = rest;
        self.read += 4;
        Ok(u32::from_le_bytes(*field))
    }

    /// The next field as a float.
    pub fn f32(&mut self) -> Result<f32> {
        Ok(f32::from_bits(self.u32()?))
    }

    /// Refuses bytes that no field has claimed.
    pub fn end(self) -> Result<()> {
        if !self.rest.is_empty() {
            fail!(
                BadArgument,
                "{} has {} bytes, expected {}",
                self.what,
                self.read + self.rest.len(),
                self.read
            );
        }
        Ok(())
    }

    /// Refuses a version other than `expected`.
    pub fn version(&mut self, expected: u32) -> Result<()> {
        let found = self.u32()?;
        if found != expected {
            fail!(Unsupported, "{} has version {found}, this engine reads version {expected}", self.what);
        }
        Ok(())
    }
}

/// Refuses a value outside of `1..=most`.
pub fn within(what: &str, value: u32, most: u32) -> Result<usize> {
    if !(1..=most).contains(&value) {
        fail!(BadArgument, "{what} is {value}, expected 1 to {most}");
    }
    Ok(value as usize)
}

/// The `index`-th little-endian number of a table whose length has been checked.
pub fn number(table: &[u8], index: usize) -> u32 {
    let bytes = &table[4 * index..4 * index + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
