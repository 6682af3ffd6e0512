//! Joining a group on several hosts: the ranks of each host join first, then hosts meet, then rails are made.
//!
//! Ranks that would connect hosts by different backends would wait for each other: so hubs tell theirs where they say how they can be
//! reached, the first rank of each host tells its host, and nobody makes a rail who was told of another than its own. Making one waits for
//! peers and looks at nothing else, so it happens aside: who waits for it hears of failures.

use super::chosen::{self, Chosen};
use super::cuda::{Cuda, backends::Backends};
use super::executor::{GRACE, HEAR};
use super::finding::Several;
use super::news::{Meeting, News, Times, Told};
use super::partials::Partials;
use super::rail::{Life, Rail};
use super::refusal::Refusals;
use super::shared::{Current, Inner, Shared};
use super::traffic::{Counted, Traffic};
use super::{HostsGroup, Runner};
use crate::boot;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cost::hardware::Device;
use crate::coll::cost::wire::Thresholds;
use crate::config::{Config, Engines};
use crate::control::Part;
use crate::engine::Engine;
use crate::error::{Error, Kind, Result};
use crate::group::{DEFAULT_TIMEOUT, Group, JoinOptions};
use crate::host_map::HostMap;
use crate::messages::links::{Links, addresses};
use crate::rank::Rank;
use crate::store::{Store, prefix::PrefixStore, until::Until, worker::Worker};
use crate::sync::limit::Limit;
use crate::sys::thread;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Time between two looks at the group while a rail is made.
const LOOK: Duration = Duration::from_millis(20);
/// Length of the text that the first rank of a host sends behind the group's life: the backends that connect hosts, and the members.
const NAMES: usize = 512;
/// Stands between the backends and the members.
const BETWEEN_NAMES: char = '\n';

/// What connects a rank of a group on several hosts with the others.
pub struct Between<R, L, B> {
    /// This rank's rail, if it gets one.
    pub rail: R,
    /// Carry its messages to ranks of other hosts.
    pub links: L,
    /// Move its CUDA tensors.
    pub backends: Option<B>,
    /// Type of partial results.
    pub partials: Partials,
    /// Names of the backends of rail, links and backends.
    pub engines: Engines,
}

impl HostsGroup {
    /// Joins the group that `options` name, of whose ranks `several` says where they are: on several hosts.
    pub fn join(
        store: &Arc<dyn Store>,
        worker: &Worker,
        options: &JoinOptions,
        several: Several,
        between: Between<impl Rail + 'static, impl Links + 'static, impl Backends + 'static>,
    ) -> Result<Self> {
        let Several { layout, apart, since } = several;
        let limit = Limit::from(since, options.timeout.unwrap_or(DEFAULT_TIMEOUT));
        let joined = Self::join_within(&limit, store, worker, options, layout, between);
        if let Some(apart) = apart {
            apart.end(worker, joined.as_ref().err());
        }
        joined
    }

    fn join_within(
        limit: &Limit,
        store: &Arc<dyn Store>,
        worker: &Worker,
        options: &JoinOptions,
        layout: HostMap,
        between: Between<impl Rail + 'static, impl Links + 'static, impl Backends + 'static>,
    ) -> Result<Self> {
        let Between { rail, links, backends, partials, engines } = between;
        let timeout = options.timeout.unwrap_or(DEFAULT_TIMEOUT);
        let rank = Rank(options.rank as u32);
        let (host, local) = (layout.host(rank), layout.local(rank));
        let global = |rank: &Rank| options.global_ranks.get(rank.index()).copied().unwrap_or(rank.0 as i32);
        let inner_options = JoinOptions {
            group: options.group.clone(),
            rank: local as i32,
            size: layout.members(host).len() as i32,
            global_ranks: layout.members(host).iter().map(global).collect(),
            is_default: options.is_default,
            timeout: limit.left(),
            part: Some(Part { host: layout.host_name(host).into(), ranks: layout.members(host).to_vec() }),
        };
        let purpose = format!("{} could not join group \"{}\"", layout.describe(rank), options.group);
        let until = Until::new(worker, Instant::now() + limit.left().unwrap_or_default(), purpose);
        let layout = Arc::new(layout);
        let late = || late(&until, options, &layout, rank, limit);
        let inner = Group::join(&PrefixStore::new(&inside(&layout, host), &until), &inner_options).map_err(|error| {
            let known = || {
                let (me, here) = (layout.describe(rank), layout.name_host(host));
                let text = format!("{me} could not join those of {here}, which are numbered from 0 here: {}", error.message);
                Error { message: text, ..error.clone() }
            };
            (error.kind == Kind::Timeout).then(late).flatten().unwrap_or_else(known)
        });
        let inner = Arc::new(inner?);
        inner.set_timeout(timeout);
        let current = Arc::new(Current::default());
        let members = if options.global_ranks.is_empty() { String::new() } else { boot::name_members(&options.global_ranks) };
        let meeting = Meeting {
            store: &until,
            group: inner.control().name(),
            prefix: format!("symm-news/{}/{}", options.group, Config::get().restart),
            layout: &layout,
            me: rank,
            host: Arc::new(Inner(Arc::clone(inner.health()), Arc::clone(&current))),
            limit,
            addresses: None,
            times: Times::default(),
            engines: format!("{engines}{BETWEEN_NAMES}{members}"),
            late: &late,
        };
        let (news, told) = meeting.meet().map_err(|error| inner.health().fail(error))?;
        let failed = |error: Error| {
            let stands = inner.health().fail(error);
            news.tell(&stands);
            stands
        };
        let told = told_by_first(&inner, &layout, rank, told, limit).map_err(failed)?;
        let (connected, listed) = told.engines.split_once(BETWEEN_NAMES).unwrap_or((&told.engines, ""));
        if !listed.is_empty() && !members.is_empty() && listed != members {
            // `listed` comes from rank 0 of the group.
            let error = boot::other_members(&options.group, (0, listed), (layout.describe(rank).trim_start_matches("rank "), &members));
            return Err(failed(error));
        }
        if connected != engines.to_string() {
            let (first, me, group) = (layout.describe(Rank(0)), layout.describe(rank), &options.group);
            return Err(failed(Error::config(format!(
                "ranks of group \"{group}\" would connect hosts by different backends: {first} by \"{connected}\", {me} by \"{engines}\"; \
                 give SYMM_HOSTS, or torch_symm.Options(between_hosts=...), the same value on all ranks"
            ))));
        }
        let has_rail = local < layout.rails();
        let name = told.life.name("symm-rail", local);
        let mut address = has_rail.then(|| Address { store: &until, keys: addresses(&name, host).collect() });
        let rail = if has_rail { Some(made(rail, &inner, &layout, rank, &name, limit, &late).map_err(failed)?) } else { None };
        let mut joined = Self::assemble(inner, layout, rank, rail, (news, current, told.life), &engines);
        joined.cuda = backends.map(|backends| Cuda::new(backends, Arc::clone(store)));
        let links = Counted::new(links, &joined.shared.traffic, &options.global_ranks);
        joined.globals = options.global_ranks.clone();
        joined.send_by(Arc::new(links), Arc::clone(store));
        // Whoever passes has found all ranks on all hosts.
        let here = joined.layout.members(host).len();
        let thresholds = chosen::thresholds(options, here, Device::Cpu);
        // Whoever looks for those of GPUs asks their driver: only the first rank, whose thresholds are everybody's.
        let asks = joined.cuda.is_some() && rank == Rank(0);
        let cuda = if asks { chosen::thresholds(options, here, Device::Cuda) } else { Thresholds::USUAL_CUDA };
        joined.agree_on(Chosen { partials, thresholds, cuda }, Some(limit.left().unwrap_or_default()))?;
        // All have connected, unless Gloo connects later.
        if let Some(address) = address.as_mut().filter(|_| Config::get().gloo_lazy) {
            address.keys.clear();
        }
        Ok(joined)
    }

    /// The group of `inner`, the ranks of this host, and a rail.
    pub(super) fn assemble(
        inner: Arc<Group>,
        layout: Arc<HostMap>,
        rank: Rank,
        rail: Option<Arc<dyn Rail>>,
        (news, current, life): (News, Arc<Current>, Life),
        engines: &Engines,
    ) -> Self {
        let shared = Shared::new(inner.health(), rail, (news, current), Traffic::of(inner.control().name(), engines));
        let runner = Runner { inner: Arc::clone(&inner), layout: Arc::clone(&layout), shared: Arc::clone(&shared), rank, sequence: 0 };
        inner.recorder().note_hosts(layout.name_others(layout.host(rank)));
        let engine = Engine::new(runner, inner.recorder());
        let refusals = Refusals::new(&shared, &engine);
        Self { inner, layout, rank, engine, shared, refusals, globals: Vec::new(), cuda: None, monitored: AtomicU64::new(0), life }
    }
}

/// A guard of the keys by which other hosts reach this rank's rail. When it is dropped all have connected, or the group has failed.
struct Address<'a> {
    store: &'a dyn Store,
    keys: Vec<String>,
}

impl Drop for Address<'_> {
    fn drop(&mut self) {
        // A store that cannot delete keeps them.
        self.keys.iter().for_each(|key| drop(self.store.delete(key)));
    }
}

/// Begin of the keys by which the ranks of `host` join.
fn inside(layout: &HostMap, host: usize) -> String {
    format!("symm-host/{}/{host}", layout.members(host)[0])
}

/// At the end of the time of `limit`: the error that names the ranks for which others of their hosts have waited, if any have.
fn late(store: &dyn Store, options: &JoinOptions, layout: &HostMap, me: Rank, limit: &Limit) -> Option<Error> {
    let (mut late, group) = (Vec::new(), &options.group);
    for host in 0..layout.hosts() {
        let members = layout.members(host);
        let store = PrefixStore::new(&inside(layout, host), store);
        // Nothing is left of ranks that have found each other. Where nobody has come, nobody knows more than that.
        let came = boot::came(&store, group, &Config::get().restart, members.len() as u32).ok()?;
        let waited_for = (0..).map(Rank).zip(members).filter(|(local, _)| !came.is_empty() && !came.contains(local));
        late.extend(waited_for.map(|(_, &rank)| layout.describe(rank)));
    }
    let (me, late) = (layout.describe(me), (!late.is_empty()).then(|| late.join(", "))?);
    Some(Error::timeout(format!("{me} waited {:.1} s for {late} to join group \"{group}\"", limit.waited().as_secs_f64())))
}

/// Returns what the hub sent to the first rank of this host, which has it in `told`.
fn told_by_first(inner: &Group, layout: &HostMap, rank: Rank, told: Told, limit: &Limit) -> Result<Told> {
    if layout.members(layout.host(rank)).len() == 1 {
        return Ok(told);
    }
    let (first, mut bytes) = (layout.local(rank) == 0, [&told.life.to_bytes()[..], told.engines.as_bytes()].concat());
    bytes.resize(Life::BYTES + NAMES, 0);
    let mut span = || Cow::Owned(vec![Span { addr: bytes.as_mut_ptr().addr(), bytes: Life::BYTES + NAMES }]);
    let (inputs, outputs) = if first { (span(), Cow::default()) } else { (Cow::default(), span()) };
    // Those that meet other hosts know more at the end of their time.
    let left = limit.left().unwrap_or_default() + GRACE;
    inner.run(&[Call::inner(Spec { op: Op::Broadcast, inputs, outputs, ..Spec::barrier(None) })], Some(left))?;
    let (life, names) = bytes.split_first_chunk().ok_or_else(|| Error::internal("the first rank sent too few bytes"))?;
    Ok(Told { engines: String::from_utf8_lossy(names).trim_end_matches('\0').to_owned(), life: Life::from_bytes(*life) })
}

/// Makes this rank's rail, of this `name`. Ends once the group has failed.
fn made(
    rail: impl Rail + 'static,
    inner: &Group,
    layout: &HostMap,
    rank: Rank,
    name: &str,
    limit: &Limit,
    late: &dyn Fn() -> Option<Error>,
) -> Result<Arc<dyn Rail>> {
    let (host, hosts, local) = (layout.host(rank), layout.hosts(), layout.local(rank));
    let (me, others, group) = (layout.describe(rank), layout.name_others(host), inner.control().name());
    let failed = |error: Error| {
        let text = format!("{me} could not make rail {local} of group \"{group}\" to {others}: {}", error.message);
        Error { message: text, ..error }
    };
    let left = limit.left().ok_or_else(|| failed(Error::timeout("no time is left")))?;
    let (done, ended) = channel();
    let (name, rail) = (name.to_owned(), Arc::new(rail) as Arc<dyn Rail>);
    let making = Arc::clone(&rail);
    let make = move || {
        let made = making.make(&name, host, hosts, left);
        drop(making);
        let _ = done.send(made);
    };
    thread::spawn("symm-rail", None, make).map_err(failed)?;
    let wait = || loop {
        match ended.recv_timeout(LOOK) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if limit.left().is_some() => return Err(failed(error)),
            Ok(Err(error)) => {
                // Others, whose time ends now, too, may say more.
                let until = Instant::now() + HEAR;
                while inner.error().is_none() && Instant::now() < until {
                    std::thread::sleep(LOOK / 4);
                }
                return Err(inner.error().or_else(late).unwrap_or_else(|| failed(Error::timeout(error.message))));
            }
            Err(RecvTimeoutError::Timeout) => inner.error().map_or(Ok(()), Err)?,
            Err(RecvTimeoutError::Disconnected) => return Err(failed(Error::internal("making it panicked"))),
        }
    };
    wait().inspect_err(|_| rail.give_up())?;
    Ok(rail)
}
