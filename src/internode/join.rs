//! Joining a multi-node group: the ranks of each node join first, then the node leaders connect,
//! then rails are created.
//!
//! Ranks with different inter-node backends would wait for each other forever. The hubs therefore
//! publish their backends with their addresses, and the first rank of each node sends these
//! backends to its node. A rank that would use other backends fails before it creates a rail.
//! Creating a rail waits for peers and does not check for failures, so it runs on a separate thread
//! while the joining thread polls for failures.

mod failures;

use super::agreed_settings::{self, AgreedSettings};
use super::cuda::CudaInternode;
use super::discovery::{self, MultiNodeJoin};
use super::executor::{INTER_NODE_GRACE, INTRA_NODE_GRACE};
use super::local_node::{IntraNodeRanks, LocalCallState};
use super::oob::{HubAnnouncement, OobConnector, OobTimeouts};
use super::rail::{Life, Rail};
use super::reduce_dtype::ReduceDtype;
use super::traffic::TrafficPath;
use super::{Internode, InternodeParts, global};
use crate::bootstrap::{self, JoinOptions, Joined, MultiNodeRanks};
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cost::hardware::DeviceKind;
use crate::coll::cost::network::RailThresholds;
use crate::coll::cpu::CpuRunner;
use crate::config::{Config, InterNodeBackends, InterNodeChoice};
use crate::control::ParentGroup;
use crate::error::{Error, ErrorKind, Result};
use crate::health::Health;
use crate::mem::layout::MAX_RANKS;
use crate::messages::links::{Links, addresses};
use crate::messages::{InternodeLinks, Messages};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::store::{Store, deadline::DeadlineStore, prefix::PrefixStore};
use crate::sync::timeout::CallTimeout;
use crate::sys::{interrupt, thread};
use crate::trace;
use crate::transport::{GivenUp, HOST, Seat, Transports};
use std::borrow::Cow;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

/// Poll interval for the group's failure while a rail is created.
const INTERNODE_POLL: Duration = Duration::from_millis(20);
/// Length of the text that the first rank of a node sends after the group's `Life`: the inter-node
/// backends, and the members.
const NAMES: usize = 512;
/// Separates the backends from the members.
const BETWEEN_NAMES: char = '\n';

/// A rank's choices for a multi-node group.
pub struct InternodeOptions<'a> {
    /// The inter-node backends that the rank chooses, or its choice to reject multi-node groups.
    pub choice: InterNodeChoice,
    /// Type of partial sums.
    pub reduce_dtype: ReduceDtype,
    /// The group's store, in which two ranks meet later.
    pub store: &'a Arc<dyn Store>,
    /// Returns the creator of transports for the backend of this name.
    pub transports: &'a dyn Fn(&str) -> Arc<dyn Transports>,
}

/// A multi-node group that one rank joins.
pub struct InternodeJoin<'a> {
    options: &'a JoinOptions,
    across: &'a InternodeOptions<'a>,
    backends: &'a InterNodeBackends,
    store: DeadlineStore<'a>,
    node_map: Arc<NodeMap>,
    /// The ranks' records in the store, if the node map was found through them.
    records: Option<Box<MultiNodeRanks>>,
    rank: Rank,
    limit: CallTimeout,
}

/// A rank that has connected to the other nodes of its group.
pub struct Joiner<'a> {
    internode: Arc<Internode>,
    chosen: AgreedSettings,
    address: Option<Address<'a>>,
}

impl<'a> InternodeJoin<'a> {
    /// Starts to join the group that `options` name; `several` has its node map.
    ///
    /// # Errors
    /// `Internal` if inter-node backends are not allowed, `Config` if the node map does not permit
    /// the order of sums.
    pub fn new(
        store: &'a dyn Store,
        options: &'a JoinOptions,
        several: MultiNodeJoin,
        across: &'a InternodeOptions<'a>,
    ) -> Result<Self> {
        let InterNodeChoice::Backends(backends) = &across.choice else {
            return Err(Error::internal("several nodes were not refused"));
        };
        let MultiNodeJoin { layout, apart, since } = several;
        agreed_settings::check_order(options, &layout)?;
        let (rank, limit) =
            (Rank(options.rank as u32), CallTimeout::from(since, options.timeout()));
        let purpose =
            format!("{} could not join group \"{}\"", layout.describe(rank), options.group);
        let store = DeadlineStore::new(
            store,
            Instant::now() + limit.remaining().unwrap_or_default(),
            purpose,
        );
        let (node_map, records) = (Arc::new(layout), apart);
        let joining = Self { options, across, backends, store, node_map, records, rank, limit };
        joining.forget_failure();
        Ok(joining)
    }

    /// Joins the ranks of this node; `group` creates a group of them.
    pub fn inside<T>(
        &self,
        group: impl FnOnce(Joined, &JoinOptions, ParentGroup) -> Result<T>,
    ) -> Result<T> {
        let Self { options, node_map: layout, rank, .. } = self;
        let node = layout.node_of(*rank);
        let global = |rank: &Rank| global(&options.global_ranks, *rank).0;
        let inner = JoinOptions {
            group: options.group.clone(),
            rank: layout.local_rank(*rank) as i32,
            size: layout.ranks_of(node).len() as i32,
            global_ranks: layout.ranks_of(node).iter().map(|rank| global(rank) as i32).collect(),
            is_default: options.is_default,
            timeout: self.limit.remaining(),
            order: options.order,
            ctas: options.ctas,
        };
        let part = ParentGroup {
            node: layout.node_name(node).into(),
            ranks: layout.ranks_of(node).to_vec(),
            global_ranks: (0..layout.size() as u32).map(|rank| global(&Rank(rank))).collect(),
        };
        let store = PrefixStore::new(&inside(layout, node), &self.store);
        let joined =
            inner.spec(MAX_RANKS, trace::ended).and_then(|spec| bootstrap::join(&store, &spec));
        joined.and_then(|joined| group(joined, &inner, part)).map_err(|error| {
            let known = || {
                let (me, here) = (layout.describe(*rank), layout.name_node(node));
                let text = format!(
                    "{me} could not join those of {here}, which are numbered from 0 here: {}",
                    error.message
                );
                Error { message: text, ..error.clone() }
            };
            (error.kind == ErrorKind::Timeout).then(|| self.late()).flatten().unwrap_or_else(known)
        })
    }

    /// Connects the group, with this `health` and these `messages`, to the other nodes. `runner`
    /// runs calls of the ranks of this node.
    pub fn meet(
        &self,
        health: &Arc<Health>,
        messages: &Messages,
        runner: &mut CpuRunner,
    ) -> Result<(Arc<Internode>, Joiner<'_>)> {
        let Self { options, node_map: layout, backends, rank, limit, .. } = self;
        let (me, node, local, group) =
            (*rank, layout.node_of(*rank), layout.local_rank(*rank), &options.group);
        let current = Arc::new(LocalCallState::default());
        let members = if options.global_ranks.is_empty() {
            String::new()
        } else {
            bootstrap::name_members(&options.global_ranks)
        };
        let meeting = OobConnector {
            store: &self.store,
            group: health.control().name(),
            prefix: format!("symm-oob/{group}/{}", Config::get().restart),
            node_map: layout,
            me,
            node: Arc::new(IntraNodeRanks(Arc::clone(health), Arc::clone(&current))),
            limit,
            addresses: None,
            times: OobTimeouts::default(),
            backends: format!("{backends}{BETWEEN_NAMES}{members}"),
            late: &|| self.late(),
            failed: &self.failures(),
        };
        let (news, told) = meeting.connect().map_err(|error| health.fail(error))?;
        let failed = |error: Error| {
            let stands = health.fail(error);
            news.broadcast_failure(&stands);
            stands
        };
        let told = self.receive_backend_choice(runner, told).map_err(failed)?;
        let (connected, listed) =
            told.backends.split_once(BETWEEN_NAMES).unwrap_or((&told.backends, ""));
        if !listed.is_empty() && !members.is_empty() && listed != members {
            // `listed` comes from rank 0 of the group.
            let error = bootstrap::other_members(
                group,
                (0, listed),
                (layout.describe(me).trim_start_matches("rank "), &members),
            );
            return Err(failed(error));
        }
        if connected != backends.to_string() {
            let (first, me) = (layout.describe(Rank(0)), layout.describe(me));
            return Err(failed(Error::config(format!(
                "ranks of group \"{group}\" would connect nodes by different backends: {first} \
                 by \"{connected}\", {me} by \"{backends}\"; \
                 give SYMM_INTER_NODE_BACKEND, or torch_symm.Options(inter_node_backend=...), the \
                 same value on all ranks"
            ))));
        }
        let transports = (self.across.transports)(&backends.cpu);
        let has_rail = local < layout.num_rails();
        let name = told.life.name("symm-rail", local);
        let address = has_rail
            .then(|| Address { store: &self.store, keys: addresses(&name, node).collect() });
        if options.is_default {
            discovery::note_life(told.life);
        }
        let rail = if has_rail {
            Some(self.made(&transports, health, name).map_err(failed)?)
        } else {
            None
        };
        let store = self.across.store;
        let connections = InternodeParts {
            rail,
            oob: news,
            current,
            life: told.life,
            backends: (*backends).clone(),
            store: Arc::clone(store),
            cuda: (!backends.cuda.is_empty()).then(|| {
                CudaInternode::new((self.across.transports)(&backends.cuda), Arc::clone(store))
            }),
            globals: options.global_ranks.clone(),
        };
        // Finding the thresholds of GPUs queries their driver, so only rank 0 does it; all ranks
        // use its thresholds.
        let asks = connections.cuda.is_some() && me == Rank(0);
        let here = layout.ranks_of(node).len();
        let thresholds = agreed_settings::thresholds(options, here, DeviceKind::Cpu);
        let cuda = if asks {
            agreed_settings::thresholds(options, here, DeviceKind::Cuda)
        } else {
            RailThresholds::DEFAULT_CUDA
        };
        let internode = Internode::new(health, layout, me, connections);
        let (traffic, globals) = (Arc::clone(&internode.traffic), options.global_ranks.clone());
        let count = move |peer, sent, received| {
            traffic.add(TrafficPath::Link(global(&globals, peer)), (sent, received))
        };
        let links = Arc::new(Links::new(transports, Box::new(count)));
        let (store, layout, prefix) =
            (Arc::clone(store), Arc::clone(layout), told.life.name("symm-pair", ""));
        messages.reach(InternodeLinks {
            links,
            store,
            node_map: layout,
            me,
            prefix,
            changed: Condvar::new(),
        });
        let chosen = AgreedSettings {
            reduce_dtype: self.across.reduce_dtype,
            order: self.options.order,
            thresholds,
            cuda,
        };
        Ok((Arc::clone(&internode), Joiner { internode, chosen, address }))
    }

    /// Returns the time that is left for joining.
    pub fn left(&self) -> Duration {
        self.limit.remaining().unwrap_or_default()
    }

    /// Returns the hub's settings on all ranks of this node; the first rank has received them in
    /// `told`.
    fn receive_backend_choice(
        &self,
        runner: &mut CpuRunner,
        told: HubAnnouncement,
    ) -> Result<HubAnnouncement> {
        if self.node_map.ranks_of(self.node_map.node_of(self.rank)).len() == 1 {
            return Ok(told);
        }
        let (first, mut bytes) = (
            self.node_map.local_rank(self.rank) == 0,
            [&told.life.to_bytes()[..], told.backends.as_bytes()].concat(),
        );
        bytes.resize(Life::BYTES + NAMES, 0);
        let mut span = || {
            Cow::Owned(vec![Span { addr: bytes.as_mut_ptr().addr(), bytes: Life::BYTES + NAMES }])
        };
        let (inputs, outputs) =
            if first { (span(), Cow::default()) } else { (Cow::default(), span()) };
        // The longer timeout lets the node leaders, which know which nodes are late, report first.
        let limit = CallTimeout::from_first_wait(self.left() + INTRA_NODE_GRACE);
        runner.run(
            &Call::inner(CallSpec {
                op: Collective::Broadcast,
                inputs,
                outputs,
                ..CallSpec::barrier(None)
            }),
            &limit,
        )?;
        let (life, names) = bytes
            .split_first_chunk()
            .ok_or_else(|| Error::internal("the first rank sent too few bytes"))?;
        Ok(HubAnnouncement {
            backends: String::from_utf8_lossy(names).trim_end_matches('\0').to_owned(),
            life: Life::from_bytes(*life),
        })
    }

    /// Creates this rank's rail with this `name`. Returns early if the group fails.
    fn made(
        &self,
        transports: &Arc<dyn Transports>,
        health: &Health,
        name: String,
    ) -> Result<Rail> {
        let (layout, limit) = (&self.node_map, &self.limit);
        let (node, internode, local) =
            (layout.node_of(self.rank), layout.num_nodes(), layout.local_rank(self.rank));
        let (me, others, group) =
            (layout.describe(self.rank), layout.name_others(node), health.control().name());
        let failed = |error: Error| {
            let text = format!(
                "{me} could not make rail {local} of group \"{group}\" to {others}: {}",
                error.message
            );
            Error { message: text, ..error }
        };
        let left = limit.remaining().ok_or_else(|| failed(Error::timeout("no time is left")))?;
        let (done, ended) = channel();
        let (making, given_up) = (Arc::clone(transports), GivenUp::default());
        let needed = given_up.clone();
        let make = move || {
            let seat = Seat { rank: node, size: internode, device: HOST };
            let _ = done.send(making.connect(&name, &seat, left, false, &needed));
        };
        thread::spawn("symm-rail", None, make).map_err(failed)?;
        let wait = || loop {
            match ended.recv_timeout(INTERNODE_POLL) {
                Ok(Ok(transport)) => return Ok(Rail::new(Arc::clone(transports), transport)),
                Ok(Err(error)) if limit.remaining().is_some() => return Err(failed(error)),
                Ok(Err(error)) => {
                    // Other ranks, which time out at the same moment, may report a better reason.
                    let until = Instant::now() + INTER_NODE_GRACE;
                    while health.error().is_none() && Instant::now() < until {
                        std::thread::sleep(INTERNODE_POLL / 4);
                    }
                    return Err(health
                        .error()
                        .or_else(|| self.late())
                        .unwrap_or_else(|| failed(Error::timeout(error.message))));
                }
                Err(RecvTimeoutError::Timeout) => {
                    health.error().map_or(Ok(()), Err)?;
                    interrupt::check().map_err(failed)?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed(Error::internal("making it panicked")));
                }
            }
        };
        wait().inspect_err(|_| {
            given_up.set();
        })
    }
}

impl Joiner<'_> {
    /// Waits until all ranks of all nodes have joined and made the same choice; `run` runs calls of
    /// the group.
    pub fn agree(mut self, run: impl FnOnce(&Call<'_>) -> Result<()>) -> Result<()> {
        // A rank that passes this exchange knows that all ranks of all nodes have joined.
        self.internode.agree_on(self.chosen, run)?;
        // All rails are connected by now, unless Gloo connects lazily; then the keys stay.
        if let Some(address) = self.address.as_mut().filter(|_| Config::get().gloo_lazy) {
            address.keys.clear();
        }
        Ok(())
    }
}

/// A guard of the keys by which other nodes reach this rank's rail. It is dropped when all nodes
/// have connected or the group has failed.
struct Address<'a> {
    store: &'a dyn Store,
    keys: Vec<String>,
}

impl Drop for Address<'_> {
    fn drop(&mut self) {
        // A store that does not support deletion keeps the keys.
        self.keys.iter().for_each(|key| drop(self.store.delete(key)));
    }
}

/// Returns the prefix of the keys by which the ranks of `node` join.
fn inside(layout: &NodeMap, node: usize) -> String {
    format!("symm-node/{}/{node}", layout.ranks_of(node)[0])
}

/// Connects nodes whose ranks are threads of a test; a rank may bring a `rail`, and all meet in
/// `store`.
#[cfg(test)]
pub(crate) fn among_threads(
    health: &Arc<Health>,
    layout: &Arc<NodeMap>,
    me: Rank,
    rail: Option<Rail>,
    store: &Arc<dyn Store>,
) -> Arc<Internode> {
    let current = Arc::new(LocalCallState::default());
    let meeting = OobConnector {
        store: &**store,
        group: "test",
        prefix: "news".into(),
        node_map: layout,
        me,
        node: Arc::new(IntraNodeRanks(Arc::clone(health), Arc::clone(&current))),
        limit: &CallTimeout::from(Instant::now(), Duration::from_secs(60)),
        addresses: Some(vec![std::net::Ipv4Addr::LOCALHOST.into()]),
        times: OobTimeouts::default(),
        backends: String::new(),
        late: &|| None,
        failed: &|| None,
    };
    let (news, HubAnnouncement { life, .. }) = meeting.connect().expect("all meet");
    let (store, backends) =
        (Arc::clone(store), InterNodeBackends { cpu: "threads".into(), cuda: String::new() });
    Internode::new(
        health,
        layout,
        me,
        InternodeParts {
            rail,
            oob: news,
            current,
            life,
            backends,
            store,
            cuda: None,
            globals: Vec::new(),
        },
    )
}
