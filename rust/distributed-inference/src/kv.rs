//! Sessions' keys and values in pages of 16 tokens, from one pool.
//!
//! A page holds keys and values of 16 consecutive positions in all owned layers:
//! [layer][key, value][kv head][16][head_dim], as f32, f16 or q8_0. Sessions may share pages (a fork shares what both have
//! in common); whoever is about to write into a shared page gets a copy of its own first. This module
//! keeps the books; the bytes are the region's.

use crate::quants::{Format, to_half};
use crate::{Result, fail};

/// Tokens in a page, and the unit of the online softmax.
pub const PAGE_TOKENS: usize = 16;

/// What keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// As computed.
    F32,
    /// Rounded to half precision; beyond 65504 it becomes infinite, which the phase's end refuses.
    F16,
    /// Rounded to bytes, 32 of a head with one half-precision scale.
    Q8,
}

impl KvType {
    /// The type of a ggml id, for heads of `head_dim` elements.
    pub fn of(id: u32, head_dim: usize) -> Result<Self> {
        match id {
            0 => Ok(Self::F32),
            1 => Ok(Self::F16),
            8 if head_dim.is_multiple_of(32) => Ok(Self::Q8),
            8 => fail!(
                Unsupported,
                "kv_type 8 (Q8_0) keeps heads in blocks of 32 elements, but head_dim is {head_dim}"
            ),
            other => fail!(Unsupported, "kv_type {other}, expected 0 (F32), 1 (F16) or 8 (Q8_0)"),
        }
    }

    /// Bytes of one token's `head_dim` elements.
    pub fn bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 => 2 * head_dim,
            Self::Q8 => head_dim / 32 * 34,
        }
    }

    /// Keeps a head's values.
    pub fn keep(self, values: &[f32], out: &mut [u8]) {
        match self {
            Self::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
            Self::F16 => {
                for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *out = to_half(*value).to_le_bytes();
                }
            }
            Self::Q8 => {
                for (out, values) in out.as_chunks_mut::<34>().0.iter_mut().zip(values.as_chunks::<32>().0) {
                    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                    let scale = to_half(most / 127.0);
                    out[..2].copy_from_slice(&scale.to_le_bytes());
                    // Divided by the scale that will be multiplied with, so that its rounding is made good.
                    let d = crate::quants::from_half(scale);
                    for (out, value) in out[2..].iter_mut().zip(values) {
                        let q = if d > 0.0 { libm::rintf(value / d).clamp(-127.0, 127.0) } else { 0.0 };
                        *out = q as i8 as u8;
                    }
                }
            }
        }
    }

    /// Writes the values of what was kept.
    pub fn open(self, kept: &[u8], values: &mut [f32]) {
        let id = match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8 => 8,
        };
        if let Ok(format) = Format::of_type(id) {
            format.dequantise(kept, values);
        }
    }
}

/// A session: the pages it holds, and how many tokens are committed.
#[derive(Debug, Default)]
struct Session {
    pages: Vec<u32>,
    length: usize,
}

/// What a session held before a batch took pages for it.
#[derive(Debug)]
struct Before {
    slot: u32,
    pages: usize,
    /// The shared page that was replaced by a copy, and its place in the session.
    shared: Option<(usize, u32)>,
}

/// The pool and the sessions.
#[derive(Debug)]
pub struct Kv {
    sessions: Vec<Option<Session>>,
    holders: Vec<u32>,
    free: Vec<u32>,
    before: Vec<Before>,
    used_peak: usize,
    page_floats: usize,
}

/// Rows of one session in a batch: `count` tokens from its length on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grow {
    /// The session.
    pub slot: u32,
    /// Tokens it gets.
    pub count: usize,
}

fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl Kv {
    /// A pool of `pages` pages of `page_floats` numbers, for at most `max_sessions` sessions.
    pub fn new(max_sessions: usize, pages: usize, page_floats: usize) -> Self {
        Self {
            sessions: (0..max_sessions).map(|_| None).collect(),
            holders: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
            before: Vec::with_capacity(max_sessions),
            used_peak: 0,
            page_floats,
        }
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.holders.len()
    }

    /// Pages that belong to no session.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// The most pages that were in use at once.
    pub fn used_peak(&self) -> usize {
        self.used_peak
    }

    /// A new, empty session's slot.
    pub fn open(&mut self) -> Result<u32> {
        let Some(slot) = self.sessions.iter().position(Option::is_none) else {
            fail!(OverBudget, "all {} sessions are open: close one first", self.sessions.len());
        };
        self.sessions[slot] = Some(Session::default());
        Ok(slot as u32)
    }

    /// Ends a session.
    pub fn close(&mut self, slot: u32) -> Result<()> {
        self.truncate(slot, 0)?;
        self.sessions[slot as usize] = None;
        Ok(())
    }

    /// Tokens that a session has committed.
    pub fn length(&self, slot: u32) -> Result<usize> {
        Ok(self.session(slot)?.length)
    }

    /// The pages of a session.
    pub fn session_pages(&self, slot: u32) -> Result<&[u32]> {
        Ok(&self.session(slot)?.pages)
    }

    /// Forgets a session's tokens from `length` on.
    pub fn truncate(&mut self, slot: u32, length: usize) -> Result<()> {
        self.refuse_in_batch(slot)?;
        let session = self.session_mut(slot)?;
        if length > session.length {
            fail!(
                BadArgument,
                "session {slot} has {} tokens and cannot be truncated to {length}",
                session.length
            );
        }
        session.length = length;
        while self.session(slot)?.pages.len() > pages_for(length) {
            let page = self.session_mut(slot)?.pages.pop().unwrap_or_default();
            self.release(page);
        }
        Ok(())
    }

    /// A new session that begins with the first `length` tokens of `slot`: whole pages are shared, a
    /// partial one is copied, so that both may go on from there.
    pub fn fork(&mut self, slot: u32, length: usize, data: &mut [f32]) -> Result<u32> {
        let session = self.session(slot)?;
        if length > session.length {
            fail!(
                BadArgument,
                "session {slot} has {} tokens and cannot be forked at {length}",
                session.length
            );
        }
        let (whole, partial) = (length / PAGE_TOKENS, !length.is_multiple_of(PAGE_TOKENS));
        if partial && self.free.is_empty() {
            fail!(
                OverBudget,
                "forking session {slot} at {length} needs one page, none of {} is free",
                self.pages()
            );
        }
        let fork = self.open()?;
        for index in 0..pages_for(length) {
            let page = self.session(slot)?.pages[index];
            let page = if index < whole { self.share(page) } else { self.copy(page, data) };
            self.session_mut(fork)?.pages.push(page);
        }
        self.session_mut(fork)?.length = length;
        Ok(fork)
    }

    /// Gives an empty session pages for `length` tokens, for the host to fill.
    pub fn restore(&mut self, slot: u32, length: usize) -> Result<()> {
        self.refuse_in_batch(slot)?;
        let session = self.session(slot)?;
        if session.length != 0 {
            fail!(
                BadState,
                "session {slot} has {} tokens; only an empty one can be restored",
                session.length
            );
        }
        let wanted = pages_for(length);
        if wanted > self.free.len() {
            fail!(
                OverBudget,
                "restoring {length} tokens takes {wanted} pages, {} of {} are free",
                self.free.len(),
                self.pages()
            );
        }
        for _ in 0..wanted {
            let page = self.take();
            self.session_mut(slot)?.pages.push(page);
        }
        self.session_mut(slot)?.length = length;
        Ok(())
    }

    /// Takes the pages that a batch needs, all or none; until [`Kv::commit`] or [`Kv::undo`] the sessions'
    /// lengths stay as they are.
    pub fn grow(&mut self, batch: impl Iterator<Item = Grow> + Clone, data: &mut [f32]) -> Result<()> {
        let mut wanted = 0;
        for Grow { slot, count } in batch.clone() {
            let session = self.session(slot)?;
            wanted += pages_for(session.length + count) - session.pages.len();
            wanted += usize::from(self.shared_partial(slot)?.is_some());
        }
        if wanted > self.free.len() {
            fail!(
                OverBudget,
                "the batch needs {wanted} more KV pages of {PAGE_TOKENS} tokens, {} of {} are free",
                self.free.len(),
                self.pages()
            );
        }
        for Grow { slot, count } in batch {
            let shared = self.shared_partial(slot)?;
            let session = self.session(slot)?;
            let (held, total) = (session.pages.len(), pages_for(session.length + count));
            self.before.push(Before { slot, pages: held, shared });
            if let Some((index, page)) = shared {
                // The old page keeps its holder until the batch is committed, so that it can come back.
                let own = self.copy(page, data);
                self.session_mut(slot)?.pages[index] = own;
            }
            for _ in held..total {
                let page = self.take();
                self.session_mut(slot)?.pages.push(page);
            }
        }
        Ok(())
    }

    /// Ends a batch: its sessions have grown.
    pub fn commit(&mut self, batch: impl Iterator<Item = Grow>) -> Result<()> {
        for Grow { slot, count } in batch {
            self.session_mut(slot)?.length += count;
        }
        while let Some(before) = self.before.pop() {
            if let Some((_, page)) = before.shared {
                self.release(page);
            }
        }
        Ok(())
    }

    /// Forgets a batch: every session holds what it held before.
    pub fn undo(&mut self) -> Result<()> {
        while let Some(before) = self.before.pop() {
            while self.session(before.slot)?.pages.len() > before.pages {
                let page = self.session_mut(before.slot)?.pages.pop().unwrap_or_default();
                self.release(page);
            }
            if let Some((index, page)) = before.shared {
                let own = std::mem::replace(&mut self.session_mut(before.slot)?.pages[index], page);
                self.release(own);
            }
        }
        Ok(())
    }

    /// The partial last page of a session, when another session holds it too: (place, page).
    fn shared_partial(&self, slot: u32) -> Result<Option<(usize, u32)>> {
        let session = self.session(slot)?;
        if session.length.is_multiple_of(PAGE_TOKENS) {
            return Ok(None);
        }
        let index = session.length / PAGE_TOKENS;
        let page = session.pages[index];
        Ok((self.holders[page as usize] > 1).then_some((index, page)))
    }

    fn session(&self, slot: u32) -> Result<&Session> {
        match self.sessions.get(slot as usize) {
            Some(Some(session)) => Ok(session),
            _ => fail!(BadState, "session {slot} is not open"),
        }
    }

    fn session_mut(&mut self, slot: u32) -> Result<&mut Session> {
        match self.sessions.get_mut(slot as usize) {
            Some(Some(session)) => Ok(session),
            _ => fail!(BadState, "session {slot} is not open"),
        }
    }

    fn refuse_in_batch(&self, slot: u32) -> Result<()> {
        if self.before.iter().any(|before| before.slot == slot) {
            fail!(BadState, "session {slot} is in the batch that is open: end or abort it first");
        }
        Ok(())
    }

    /// A free page; the caller has made sure that there is one.
    fn take(&mut self) -> u32 {
        let page = self.free.pop().expect("the free pages were counted before");
        self.holders[page as usize] = 1;
        self.used_peak = self.used_peak.max(self.pages() - self.free.len());
        page
    }

    fn share(&mut self, page: u32) -> u32 {
        self.holders[page as usize] += 1;
        page
    }

    fn copy(&mut self, page: u32, data: &mut [f32]) -> u32 {
        let own = self.take();
        let from = page as usize * self.page_floats;
        data.copy_within(from..from + self.page_floats, own as usize * self.page_floats);
        own
    }

    fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}
