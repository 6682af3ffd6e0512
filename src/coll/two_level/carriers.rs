//! gather, scatter and all_to_all over rails: the ranks of each rail carry the messages between
//! ranks of two nodes. Pure.

use super::planner::Planner;
use super::slices::{ChunkSchedule, rails};
use super::step::{NOWHERE, Place, RailOp};
use crate::coll::call::{CallSpec, Collective};
use crate::node_map::NodeMap;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::ops::Range;

/// The number of bytes that each rank sends to each other rank.
#[derive(Clone, Debug, PartialEq)]
pub enum MessageLengths {
    /// All pairs have this length.
    Even(usize),
    /// One length for all messages between one rank and the others, in one direction; there are no
    /// other messages.
    Rooted {
        /// The root.
        root: Rank,
        /// True if the root receives.
        gathers: bool,
        /// Length of a message in bytes.
        bytes: usize,
    },
    /// A length for each pair: `sent[from * n + to]`.
    Each {
        /// Bytes of each message.
        sent: Vec<usize>,
        /// Number of ranks.
        n: usize,
    },
}

impl MessageLengths {
    /// Returns the lengths of a gather or scatter.
    fn rooted(call: &CallSpec) -> Self {
        Self::Rooted {
            root: call.root,
            gathers: call.op == Collective::Gather,
            bytes: call.agreed_bytes() as usize,
        }
    }

    fn of(&self, from: Rank, to: Rank) -> usize {
        match self {
            Self::Even(bytes) => *bytes,
            Self::Rooted { root, gathers, bytes } => {
                if (if *gathers { to } else { from }) == *root { *bytes } else { 0 }
            }
            Self::Each { sent, n } => sent[from.index() * n + to.index()],
        }
    }
}

/// The routes of inter-node messages: which rank carries each message, and in how many pipeline
/// steps.
struct RailRoutes<'a> {
    layout: &'a NodeMap,
    node: usize,
    local: usize,
    lengths: &'a MessageLengths,
    rails: usize,
    turns: ChunkSchedule,
    /// The messages that this rank carries to each node, and from each node.
    sent: Vec<Vec<(Rank, Rank)>>,
    received: Vec<Vec<(Rank, Rank)>>,
    /// Length of the longest message on this rank's rail between any two nodes.
    longest: usize,
}

impl<'a> RailRoutes<'a> {
    fn new(planner: &Planner<'a>, lengths: &'a MessageLengths, turns: ChunkSchedule) -> Self {
        let (layout, node, local, rails) =
            (planner.layout, planner.node(), planner.local(), planner.rails);
        let mut ways = Self {
            layout,
            node,
            local,
            lengths,
            rails,
            turns,
            sent: Vec::new(),
            received: Vec::new(),
            longest: 0,
        };
        let nodes = || 0..layout.num_nodes();
        ways.sent = nodes().map(|to| ways.messages_on_rail(node, to)).collect();
        ways.received = nodes().map(|from| ways.messages_on_rail(from, node)).collect();
        let all = nodes()
            .flat_map(|from| nodes().map(move |to| (from, to)))
            .flat_map(|(from, to)| ways.messages_on_rail(from, to));
        ways.longest = all.map(|(from, to)| lengths.of(from, to)).max().unwrap_or(0);
        ways
    }

    /// Returns the rail of the message from `from` to `to`, which are on different nodes: the local
    /// rank that sends it on one node and receives it on the other. Because the rail depends on the
    /// sum of both local ranks, the messages of one sender, of one receiver and of all pairs are
    /// spread over all rails.
    fn rail_of(&self, from: Rank, to: Rank) -> usize {
        (self.layout.local_rank(from) + self.layout.local_rank(to)) % self.rails
    }

    /// Returns the rank of `node` that exchanges messages with local rank `local` of this node over
    /// rail `carrier`, if it is in block `block`. A block is `rails` consecutive ranks of a node,
    /// and has at most one such rank.
    fn peer_on_rail(
        &self,
        carrier: usize,
        local: usize,
        node: usize,
        block: usize,
    ) -> Option<Rank> {
        let index = block * self.rails + (carrier + self.rails - local % self.rails) % self.rails;
        if carrier < self.rails { self.layout.ranks_of(node).get(index).copied() } else { None }
    }

    /// The blocks of ranks of all other nodes, as pairs of node and block number.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (layout, here, rails) = (self.layout, self.node, self.rails);
        let blocks = move |node: usize| {
            (0..layout.ranks_of(node).len().div_ceil(rails)).map(move |block| (node, block))
        };
        (0..layout.num_nodes()).filter(move |&node| node != here).flat_map(blocks)
    }

    /// The messages that this rank carries from node `from` to node `to`.
    fn messages_on_rail(&self, from: usize, to: usize) -> Vec<(Rank, Rank)> {
        if from == to {
            return vec![];
        }
        let members = |node: usize| self.layout.ranks_of(node).iter().copied();
        let pairs = members(from).flat_map(|from| members(to).map(move |to| (from, to)));
        pairs.filter(|&(from, to)| self.rail_of(from, to) == self.local).collect()
    }

    /// Returns the chunk of a message from `from` to `to` that moves in step `turn`.
    fn piece(&self, from: Rank, to: Rank, turn: usize) -> Range<usize> {
        self.turns.piece(&(0..self.lengths.of(from, to)), turn)
    }

    /// Returns true if any rank of this rank's rail sends in step `turn`; all ranks of the rail
    /// compute the same value.
    fn sends_in_step(&self, turn: usize) -> bool {
        !self.turns.piece(&(0..self.longest), turn).is_empty()
    }

    /// Returns for each node how many bytes of its messages move in step `turn`; `carried` is
    /// `sent` or `received`.
    fn lengths(&self, carried: &[Vec<(Rank, Rank)>], turn: usize) -> Vec<usize> {
        carried
            .iter()
            .map(|pairs| pairs.iter().map(|&(from, to)| self.piece(from, to, turn).len()).sum())
            .collect()
    }

    /// Returns the place of each message of `carried` in step `turn`; all are contiguous in
    /// `whole`.
    fn offsets(
        &self,
        carried: &[Vec<(Rank, Rank)>],
        turn: usize,
        whole: Place,
    ) -> BTreeMap<(Rank, Rank), Place> {
        let mut end = 0;
        let mut next = |&(from, to): &(Rank, Rank)| {
            let start = end;
            end += self.piece(from, to, turn).len();
            ((from, to), whole.part(&(start..end)))
        };
        carried.iter().flatten().map(&mut next).collect()
    }
}

impl Planner<'_> {
    /// In each step: 1. Intra-node: chunks for other nodes move to their carriers. 2. Inter-node:
    /// the carriers exchange these chunks. 3. Intra-node: the received chunks move to their ranks.
    /// The messages within the node, `near`, move while the first chunks are on the wire.
    pub(super) fn carry(
        &mut self,
        told: Option<&MessageLengths>,
        give: &[Place],
        take: &[Place],
        near: Option<(Vec<Place>, Vec<Place>)>,
    ) {
        let (layout, nodes, rooted) =
            (self.layout, self.layout.num_nodes(), MessageLengths::rooted(self.call));
        let lengths = told.unwrap_or(&rooted);
        self.rails = match lengths {
            MessageLengths::Even(bytes) => rails(bytes * layout.size(), layout, &self.thresholds),
            MessageLengths::Rooted { .. } | MessageLengths::Each { .. } => layout.num_rails(),
        };
        // The ranks of an all_to_all have already agreed on the call, before they exchanged its
        // lengths.
        if self.call.op != Collective::AllToAll {
            self.agree();
        }
        let ranks = || (0..layout.size() as u32).map(Rank);
        let pairs = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
        let far = pairs.filter(|&(from, to)| layout.node_of(from) != layout.node_of(to));
        let longest = far.map(|(from, to)| lengths.of(from, to)).max().unwrap_or(0);
        let parts = |from: usize, to: usize| {
            (layout.ranks_of(from).len() * layout.ranks_of(to).len()).div_ceil(self.rails)
        };
        let most = (0..nodes)
            .flat_map(|from| (0..nodes).map(move |to| (from, to)))
            .filter(|(from, to)| from != to);
        let most = most.map(|(from, to)| parts(from, to)).max().unwrap_or(1);
        let ways = RailRoutes::new(
            self,
            lengths,
            ChunkSchedule::of_messages(longest, most, &self.thresholds),
        );
        self.chunked(ways.turns.count, |planner, turn| {
            let received = planner.stage_for_rails(&ways, turn, give);
            if let Some((give, take)) = near.clone().filter(|_| turn == 0) {
                planner.move_intra_node(Collective::AllToAll, 0, give, take);
            }
            planner.next_stage();
            planner.deliver_from_rails(&ways, turn, received, take);
        });
    }

    /// Moves the chunks of step `turn` to their carriers, which start the exchange; returns where
    /// chunks for this node arrive.
    fn stage_for_rails(&mut self, ways: &RailRoutes<'_>, turn: usize, give: &[Place]) -> Place {
        let (rank, local, here) = (self.rank, self.local(), self.layout.ranks_of(self.node()));
        let (sent, received) = (ways.lengths(&ways.sent, turn), ways.lengths(&ways.received, turn));
        let (from, to) = (self.take(sent.iter().sum()), self.take(received.iter().sum()));
        let places = ways.offsets(&ways.sent, turn, from);
        let mut calls = Vec::new();
        for (node, block) in ways.blocks() {
            let partner = |carrier, local| ways.peer_on_rail(carrier, local, node, block);
            let moves = |from: usize| {
                (0..ways.rails)
                    .filter_map(move |c| partner(c, from))
                    .any(|to| !ways.piece(here[from], to, turn).is_empty())
            };
            if !(0..here.len()).any(moves) {
                continue;
            }
            let given = |to: Rank| give[to.index()].part(&ways.piece(rank, to, turn));
            let inputs = (0..here.len())
                .map(|carrier| partner(carrier, local).map_or(NOWHERE, given))
                .collect();
            let brought = |(from, &rank): (usize, &Rank)| {
                partner(local, from).map_or(NOWHERE, |to| places[&(rank, to)])
            };
            calls.push((inputs, here.iter().enumerate().map(brought).collect()));
        }
        self.all_intra_node(Collective::AllToAll, 0, calls);
        if ways.sends_in_step(turn) {
            self.start(RailOp::AllToAll { from, sent, to, received });
        }
        to
    }

    /// Moves the chunks of step `turn`, which have arrived at `received`, to their ranks.
    fn deliver_from_rails(
        &mut self,
        ways: &RailRoutes<'_>,
        turn: usize,
        received: Place,
        take: &[Place],
    ) {
        let (rank, local, here) = (self.rank, self.local(), self.layout.ranks_of(self.node()));
        let places = ways.offsets(&ways.received, turn, received);
        let mut calls = Vec::new();
        for (node, block) in ways.blocks() {
            let partner = |carrier, local| ways.peer_on_rail(carrier, local, node, block);
            let moves = |to: usize| {
                (0..ways.rails)
                    .filter_map(move |c| partner(c, to))
                    .any(|from| !ways.piece(from, here[to], turn).is_empty())
            };
            if !(0..here.len()).any(moves) {
                continue;
            }
            let came = |(to, &rank): (usize, &Rank)| {
                partner(local, to).map_or(NOWHERE, |from| places[&(from, rank)])
            };
            let inputs = here.iter().enumerate().map(came).collect();
            let taken = |from: Rank| take[from.index()].part(&ways.piece(from, rank, turn));
            let outputs = (0..here.len())
                .map(|carrier| partner(carrier, local).map_or(NOWHERE, taken))
                .collect();
            calls.push((inputs, outputs));
        }
        self.all_intra_node(Collective::AllToAll, 0, calls);
    }
}
