//! Models the kernel's functions that the programs call.

#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold narrower numbers, as the instruction set defines"
)]

use anyhow::{Context as _, Result, bail};

use super::{execute::Execution, memory::Memory};

/// `enum bpf_func_id`: the functions that the programs call.
const NAMES: [(i32, &str); 31] = [
    (1, "map_lookup_elem"),
    (2, "map_update_elem"),
    (3, "map_delete_elem"),
    (5, "ktime_get_ns"),
    (7, "get_prandom_u32"),
    (8, "get_smp_processor_id"),
    (9, "skb_store_bytes"),
    (10, "l3_csum_replace"),
    (11, "l4_csum_replace"),
    (20, "skb_get_tunnel_key"),
    (21, "skb_set_tunnel_key"),
    (23, "redirect"),
    (26, "skb_load_bytes"),
    (28, "csum_diff"),
    (32, "skb_change_type"),
    (39, "skb_pull_data"),
    (40, "csum_update"),
    (84, "sk_lookup_tcp"),
    (85, "sk_lookup_udp"),
    (86, "sk_release"),
    (99, "skc_lookup_tcp"),
    (118, "jiffies64"),
    (125, "ktime_get_boot_ns"),
    (130, "ringbuf_output"),
    (131, "ringbuf_reserve"),
    (132, "ringbuf_submit"),
    (133, "ringbuf_discard"),
    (152, "redirect_neigh"),
    (155, "redirect_peer"),
    (160, "ktime_get_coarse_ns"),
    (163, "check_mtu"),
];

const TC_ACT_REDIRECT: i64 = 7;
const EFAULT: i64 = 14;
const EINVAL: i64 = 22;

/// Flags of `bpf_l4_csum_replace`.
const MARK_MANGLED_0: u64 = 0x20;
const MARK_ENFORCE: u64 = 0x40;

impl Execution<'_> {
    /// Calls the kernel's function of this number with the registers as they are.
    pub(super) fn call_kernel(&mut self, number: i32) -> Result<()> {
        let name = NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name);
        let name = name.with_context(|| format!("kernel function {number} is not modelled"))?;
        *self.counts.helpers.entry(name).or_default() += 1;
        let arguments = [1, 2, 3, 4, 5].map(|register| self.registers[register]);
        let result = match name {
            "map_lookup_elem" => self.lookup(arguments)?,
            "map_update_elem" => self.update(arguments)?,
            "map_delete_elem" => self.delete(arguments)?,
            "jiffies64" => self.jiffies.cast_signed(),
            "ktime_get_ns" | "ktime_get_boot_ns" | "ktime_get_coarse_ns" => self.nanoseconds.cast_signed(),
            "get_prandom_u32" => self.random.u32(..).into(),
            "skb_load_bytes" => self.load_bytes(arguments)?,
            "skb_store_bytes" => self.store_bytes(arguments)?,
            "l3_csum_replace" | "l4_csum_replace" => self.replace_checksum(arguments, name == "l4_csum_replace")?,
            "csum_diff" => self.difference(arguments)?,
            "skb_get_tunnel_key" => self.tunnel_key(arguments)?,
            "redirect" | "redirect_neigh" | "redirect_peer" => TC_ACT_REDIRECT,
            "ringbuf_reserve" => self.memory.reserve(arguments[1] as usize).cast_signed(),
            // One CPU, no socket of the node, every packet fits, and events go nowhere.
            _ => 0,
        };
        self.registers[0] = result.cast_unsigned();
        // The kernel may change the others; a program that uses them would not pass the verifier.
        self.registers[1..6].fill(u64::MAX);
        Ok(())
    }

    fn bytes(&self, address: u64, size: usize) -> Result<Vec<u8>> {
        Ok(self.memory.at(address, size)?.0.to_vec())
    }

    fn lookup(&mut self, [map, key, ..]: [u64; 5]) -> Result<i64> {
        let number = self.memory.map(map)?;
        let key = self.bytes(key, self.memory.maps[number].key_size)?;
        let map = &self.memory.maps[number];
        *self.counts.lookups.entry(map.name.clone()).or_default() += 1;
        let found = map.find(&key)?;
        Ok(found.map_or(0, |offset| Memory::value_pointer(number, offset).cast_signed()))
    }

    fn update(&mut self, [map, key, value, flags, _]: [u64; 5]) -> Result<i64> {
        let number = self.memory.map(map)?;
        let map = &self.memory.maps[number];
        let (key, value) = (self.bytes(key, map.key_size)?, self.bytes(value, map.value_size)?);
        self.memory.maps[number].update(&key, &value, flags)
    }

    fn delete(&mut self, [map, key, ..]: [u64; 5]) -> Result<i64> {
        let number = self.memory.map(map)?;
        let key = self.bytes(key, self.memory.maps[number].key_size)?;
        Ok(self.memory.maps[number].delete(&key))
    }

    /// The number of the virtual network and the sender's IPv4 address, both in host byte order.
    fn tunnel_key(&mut self, [_, to, _, flags, _]: [u64; 5]) -> Result<i64> {
        const IPV6: u64 = 1;
        let Some((number, sender)) = self.tunnel.filter(|_| flags & IPV6 == 0) else {
            return Ok(-EINVAL);
        };
        let words = [number, sender.to_bits()].map(u32::to_ne_bytes);
        self.memory.at_mut(to, 8)?.0.copy_from_slice(&words.concat());
        Ok(0)
    }

    fn load_bytes(&mut self, [_, offset, to, length, _]: [u64; 5]) -> Result<i64> {
        let (from, length) = (offset as u32 as usize, length as usize);
        let Some(bytes) = self.memory.packet.get(from..from + length).map(<[u8]>::to_vec) else {
            return Ok(-EFAULT);
        };
        self.memory.at_mut(to, length)?.0.copy_from_slice(&bytes);
        Ok(0)
    }

    fn store_bytes(&mut self, [_, offset, from, length, _]: [u64; 5]) -> Result<i64> {
        let (to, length) = (offset as u32 as usize, length as usize);
        let bytes = self.bytes(from, length)?;
        let Some(place) = self.memory.packet.get_mut(to..to + length) else {
            return Ok(-EFAULT);
        };
        place.copy_from_slice(&bytes);
        Ok(0)
    }

    /// Replaces a word in a checksum (RFC 1624), or adds a difference if no size is given.
    fn replace_checksum(&mut self, [_, offset, from, to, flags]: [u64; 5], transport: bool) -> Result<i64> {
        let at = offset as u32 as usize;
        let Some(place) = self.memory.packet.get_mut(at..at + 2) else {
            return Ok(-EFAULT);
        };
        let old = u16::from_le_bytes([place[0], place[1]]);
        if transport && flags & MARK_MANGLED_0 != 0 && flags & MARK_ENFORCE == 0 && old == 0 {
            return Ok(0);
        }
        let (from, to) = match flags & 0xf {
            0 => (0, u64::from(to as u32)),
            2 => (u64::from(!(from as u16)), u64::from(to as u16)),
            4 => (u64::from(!(from as u32)), u64::from(to as u32)),
            size => bail!("a checksum over {size} bytes"),
        };
        let new = !folded(u64::from(!old) + from + to);
        let new = if transport && flags & MARK_MANGLED_0 != 0 && new == 0 {
            u16::MAX
        } else {
            new
        };
        place.copy_from_slice(&new.to_le_bytes());
        Ok(0)
    }

    fn difference(&mut self, [from, from_size, to, to_size, seed]: [u64; 5]) -> Result<i64> {
        let mut sum = u64::from(seed as u32);
        for (address, size, minus) in [(from, from_size, true), (to, to_size, false)] {
            if size == 0 {
                continue;
            }
            for word in self.bytes(address, size as usize)?.chunks_exact(4) {
                let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                sum += u64::from(if minus { !word } else { word });
            }
        }
        while sum >> 32 != 0 {
            sum = (sum & 0xffff_ffff) + (sum >> 32);
        }
        Ok(sum.cast_signed())
    }
}

fn folded(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
