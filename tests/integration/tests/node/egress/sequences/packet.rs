//! Reads IP packets and checks their checksums.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_integration::frames::{Ip, checksum, crc32c};

use super::Transport;

/// An IP packet without options and extension headers.
pub(super) struct Packet<'a> {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: u8,
    header: &'a [u8],
    pub(super) body: &'a [u8],
}

impl<'a> Packet<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => {
                let (header, body) = bytes.split_at_checked(20)?;
                let address = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(header.get(at..at + 4)?).ok()?));
                let length = usize::from(u16::from_be_bytes([header[2], header[3]])).checked_sub(20)?;
                Some(Self {
                    source: address(12)?,
                    destination: address(16)?,
                    protocol: header[9],
                    header,
                    body: body.get(..length)?,
                })
            }
            6 => {
                let (header, body) = bytes.split_at_checked(40)?;
                let address = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(header.get(at..at + 16)?).ok()?));
                let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
                Some(Self {
                    source: address(8)?,
                    destination: address(24)?,
                    protocol: header[6],
                    header,
                    body: body.get(..length)?,
                })
            }
            _ => None,
        }
    }

    /// Both ports; twice the identifier of an echo.
    pub(super) fn ports(&self, transport: Transport) -> [u16; 2] {
        let at = |offset: usize| u16::from_be_bytes([self.body[offset], self.body[offset + 1]]);
        match transport {
            Transport::Echo => [at(4); 2],
            Transport::Tcp | Transport::Udp | Transport::Sctp => [at(0), at(2)],
        }
    }

    pub(super) fn check_header(&self) -> Result<()> {
        let right = self.source.is_ipv6() || checksum(&[self.header]) == 0;
        ensure!(right, "the header's checksum is wrong");
        Ok(())
    }

    /// Checks that all checksums are correct.
    pub(super) fn check(&self) -> Result<()> {
        self.check_header()?;
        if self.protocol == 132 {
            let sum = u32::from_le_bytes(self.body[8..12].try_into()?);
            let mut body = self.body.to_vec();
            body[8..12].fill(0);
            ensure!(crc32c(&body) == sum, "the SCTP checksum is wrong");
            return Ok(());
        }
        let pseudo = Ip::new(self.source, self.destination).pseudo_header(self.protocol, self.body.len());
        let covered: &[u8] = if self.protocol == 1 { &[] } else { &pseudo };
        ensure!(
            checksum(&[covered, self.body]) == 0,
            "the checksum of protocol {} is wrong",
            self.protocol
        );
        Ok(())
    }
}
