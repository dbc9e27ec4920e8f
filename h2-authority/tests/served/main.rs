//! Real h2 servers behind the adapter, and clients that send what the client of h2 refuses to send.

#[cfg(test)]
mod client;
#[cfg(test)]
mod encoder;
#[cfg(test)]
mod wire;

#[cfg(test)]
mod arbitrary;
#[cfg(test)]
mod invalid;
#[cfg(test)]
mod requests;
#[cfg(test)]
mod stream;
