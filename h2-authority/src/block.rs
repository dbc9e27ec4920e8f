//! Holds the frames of one header block, as they came, until the block is complete.

use std::{borrow::Cow, ops::Range};

use bytes::BytesMut;

use crate::frame::{self, FrameHeader, HEADER_LEN, Layout, flag, kind};

/// What is kept allocated between blocks: more than any usual request needs.
const KEPT_CAPACITY: usize = 16 * 1024;

/// A payload too short for its frame's flags.
#[derive(Debug)]
pub(crate) struct BadLayout;

/// The frames of the block being collected; empty between blocks.
#[derive(Debug, Default)]
pub(crate) struct HeaderBlock {
    /// Frame headers and payloads.
    frames: BytesMut,
    first: FrameHeader,
    current: FrameHeader,
    payload_start: usize,
    /// Sum of the lengths the frame headers announced.
    announced: usize,
    continuations: usize,
    priority: Range<usize>,
    fragments: Vec<Range<usize>>,
}

impl HeaderBlock {
    /// Whether a HEADERS frame has begun and its block is not yet complete.
    pub(crate) fn is_open(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Whether this frame is the one that must come next.
    pub(crate) fn continues_with(&self, header: &FrameHeader) -> bool {
        header.kind == kind::CONTINUATION && header.stream() == self.first.stream()
    }

    /// Payload bytes of the block, if a frame with this header joins it.
    pub(crate) fn size_with(&self, header: &FrameHeader) -> usize {
        self.announced + header.length
    }

    /// CONTINUATION frames so far.
    pub(crate) fn continuations(&self) -> usize {
        self.continuations
    }

    /// Begins the next frame of the block.
    pub(crate) fn begin_frame(&mut self, header: FrameHeader, raw: [u8; HEADER_LEN]) {
        if self.is_open() {
            self.continuations += 1;
        } else {
            self.first = header;
        }
        self.announced += header.length;
        self.frames.extend_from_slice(&raw);
        self.payload_start = self.frames.len();
        self.current = header;
    }

    /// Adds bytes of the current frame's payload.
    pub(crate) fn extend(&mut self, payload: &[u8]) {
        self.frames.extend_from_slice(payload);
    }

    /// Ends the current frame; returns whether it completes the block.
    pub(crate) fn end_frame(&mut self) -> Result<bool, BadLayout> {
        let payload = self.frames.get(self.payload_start..).unwrap_or_default();
        let layout = Layout::of(&self.current, payload).ok_or(BadLayout)?;
        let in_frames = |range: Range<usize>| range.start + self.payload_start..range.end + self.payload_start;
        if self.fragments.is_empty() {
            self.priority = in_frames(layout.priority);
        }
        self.fragments.push(in_frames(layout.fragment));
        Ok(self.current.has(flag::END_HEADERS))
    }

    /// The pieces of the block put together.
    pub(crate) fn content(&self) -> Cow<'_, [u8]> {
        if let [fragment] = self.fragments.as_slice() {
            return Cow::Borrowed(self.at(fragment));
        }
        Cow::Owned(
            self.fragments
                .iter()
                .flat_map(|fragment| self.at(fragment))
                .copied()
                .collect(),
        )
    }

    /// Writes the frames as they came, complete or not.
    pub(crate) fn put_original(&self, out: &mut BytesMut) {
        out.extend_from_slice(&self.frames);
    }

    /// Writes frames that mean the same but carry `content`.
    pub(crate) fn put_with(&self, content: &[u8], out: &mut BytesMut) {
        frame::put_block(out, self.first, self.at(&self.priority), content);
    }

    /// Makes room for the next block.
    pub(crate) fn clear(&mut self) {
        let mut frames = std::mem::take(&mut self.frames);
        let mut fragments = std::mem::take(&mut self.fragments);
        *self = Self::default();
        if frames.capacity() <= KEPT_CAPACITY {
            frames.clear();
            fragments.clear();
            self.frames = frames;
            self.fragments = fragments;
        }
    }

    fn at(&self, range: &Range<usize>) -> &[u8] {
        self.frames.get(range.clone()).unwrap_or_default()
    }
}
