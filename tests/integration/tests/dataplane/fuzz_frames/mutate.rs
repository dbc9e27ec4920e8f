//! Mutates frames: changes, removes and adds bytes, with or without corrected length fields.

use fastrand::Rng;

/// Values with a meaning in some field: lengths, protocol numbers, option kinds, flags.
const NOTABLE: &[u8] = &[
    0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 20, 40, 41, 43, 44, 50, 51, 58, 59, 60, 64, 68, 69, 70, 79, 96, 127, 128, 130,
    131, 132, 133, 134, 135, 136, 137, 143, 148, 224, 253, 254, 255,
];

/// One to three changes.
pub(super) fn some(rng: &mut Rng, frame: &mut Vec<u8>) {
    for _ in 0..rng.u32(1..4) {
        one(rng, frame);
    }
    if rng.bool() {
        put_lengths_right(frame);
    }
}

/// A position after the MAC addresses, usually in the headers.
fn place(rng: &mut Rng, frame: &[u8]) -> Option<usize> {
    let (first, last) = if rng.u32(0..20) == 0 { (0, 14) } else { (12, 100) };
    let last = if rng.u32(0..4) == 0 {
        frame.len()
    } else {
        last.min(frame.len())
    };
    (first < last).then(|| rng.usize(first..last))
}

fn one(rng: &mut Rng, frame: &mut Vec<u8>) {
    let Some(at) = place(rng, frame) else { return };
    match rng.u32(0..16) {
        0..=4 => frame[at] = NOTABLE[rng.usize(0..NOTABLE.len())],
        5..=7 => frame[at] ^= 1 << rng.u32(0..8),
        8 | 9 => frame[at] = rng.u8(..),
        10 => frame.truncate(at),
        11 => frame.truncate(frame.len() - rng.usize(0..frame.len().min(12))),
        12 => frame.extend((0..rng.usize(1..40)).map(|_| rng.u8(..))),
        13 => {
            let byte = rng.u8(..);
            frame.insert(at, byte);
        }
        14 => drop(frame.remove(at)),
        _ => {
            let end = (at + rng.usize(1..8)).min(frame.len());
            rng.fill(&mut frame[at..end]);
        }
    }
}

/// Makes the IP header's lengths match the frame.
fn put_lengths_right(frame: &mut [u8]) {
    let (at, head) = match frame.get(12..14) {
        Some([0x08, 0x00]) => (16, 14),
        Some([0x86, 0xdd]) => (18, 54),
        _ => return,
    };
    if frame.len() >= 54 {
        let length = u16::try_from(frame.len() - head).expect("a short frame");
        frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
    }
}
