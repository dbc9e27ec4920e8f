//! Exchanges packets with pods of other nodes, by hand-made rows of nodes and routes: through a tunnel device, and
//! through the network that the nodes share. Frames enter and leave by real interfaces, since only they have a tunnel's
//! metadata.

mod changes;
mod explained;
mod forged;
mod host_ports;
mod native;
mod overlay;
mod past_the_tunnel;
mod scene;
mod shared_egress;
mod tunnel_port;
mod two_nodes;
