//! Services with real pods and real sockets: the agent reads Services and EndpointSlices from its manifests, and they
//! change while connections live.
//!
//! | behaviour | shown by |
//! |---|---|
//! | 1 a connection keeps its backend while endpoints change | `stay`; `frames/services.rs::known_flows_outlive_a_change_of_the_service`, `frames/affinity.rs::a_repeated_syn_stays_with_its_backend` |
//! | 2 UDP moves when its endpoint is gone, and stays when there is no other; it follows a destination that becomes a Service | `moved` |
//! | 3 ready endpoints, else serving terminating ones; Cluster and Local separately | `usable` |
//! | 4 no endpoint: refused at once; none local under Local: silence | `refused`; every answer's bytes in `frames/refusals.rs` |
//! | 5 a port that is not there: refused; an unused address: silence | `refused`; SCTP in `frames/refusals.rs` |
//! | 6 affinity of a client, per port, refreshed, over a killed agent | `affinity`; the time to the jiffy in `frames/affinity.rs` |
//! | 7 a pod reaches itself | `hairpin`; SCTP in `frames/services.rs::a_pod_reaches_itself_through_a_service` |
//! | 8 `internalTrafficPolicy: Local`, hints of nodes and zones | `topology`; every combination in the engine's `the_choice_is_the_oracles` |
//! | 9 headless Services and those of another proxy | `apart` |
//! | 10 both families, ports by name, one number for two protocols | `ports`; SCTP in `frames/services.rs::both_directions_are_translated` |
//! | 11 `publishNotReadyAddresses` | arrives as ready endpoints: `usable` |
//! | 12 an endpoint that is the node, or external | `external` |
//! | 13 errors about what was translated, path MTU | `external`; the bytes in `frames/translated_errors.rs` |
//! | 14 beside kube-proxy in both modes | `beside`; pods without Services of KNI in `dnat` |
//! | 15 many slices, an endpoint in two of them | `ports` |
//! | a virtual address in two networks | `apart` |
//! | addresses of load balancers, `externalIPs` | `load_balancers`; the bytes in `frames/outside_services.rs` |
//! | endpoints that are pods of another network, or of none | `members` |
//! | namespaces with more Services, ports, endpoints or changes than the tables have room for | `shares` |

mod affinity;
mod apart;
mod beside;
mod external;
mod hairpin;
mod load_balancers;
mod members;
mod moved;
pub(crate) mod objects;
mod ports;
mod proxies;
mod refused;
mod scene;
mod shares;
mod stay;
mod topology;
mod usable;
