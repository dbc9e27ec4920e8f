//! Runs real h2 servers behind the adapter with clients that send data which the client of h2 refuses to send.

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
