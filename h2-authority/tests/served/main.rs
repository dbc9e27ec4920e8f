//! Real h2 servers behind the adapter, and clients that send what h2's own client refuses to.

#[cfg(test)]
mod client;
#[cfg(test)]
mod encoder;
#[cfg(test)]
mod wire;

#[cfg(test)]
mod adapter;
#[cfg(test)]
mod arbitrary;
#[cfg(test)]
mod grpc_go;
#[cfg(test)]
mod robust;
#[cfg(test)]
mod splits;
