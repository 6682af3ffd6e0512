//! gather, scatter and all_to_all on several hosts: every rank has something of its own for every other.

use super::rail::Transfer;
use super::slices::part;
use super::step::{NOTHING, Scratch, Step, copy};
use crate::coll::call::{Op, Span};
use crate::error::{Error, Result};
use crate::rank::Rank;

/// Bytes that each rank sends to each other: `sent[from * n + to]`.
struct Lengths {
    sent: Vec<usize>,
    n: usize,
}

impl Lengths {
    fn of(&self, from: Rank, to: Rank) -> usize {
        self.sent[from.index() * self.n + to.index()]
    }
}

/// Place in memory that is filled, or emptied, from its begin on.
struct Cursor(usize);

impl Cursor {
    fn next(&mut self, bytes: usize) -> Span {
        self.0 += bytes;
        Span { addr: self.0 - bytes, bytes }
    }
}

impl Step<'_> {
    /// Rank that carries what `from` sends to another host: the same local index receives it there. Sums spread it whether one rank sends,
    /// one receives, or all do both.
    fn carrier(&self, from: Rank, to: Rank) -> usize {
        (self.layout.local(from) + self.layout.local(to)) % self.layout.rails()
    }

    /// gather and scatter: what everybody sends follows from the call.
    pub(super) fn gather_or_scatter(&self) -> Result<()> {
        let (n, root) = (self.layout.size(), self.call.root);
        let each = self.call.agreed_bytes() as usize;
        let gathers = self.call.op == Op::Gather;
        let length = |from: u32, to: u32| if (if gathers { to } else { from }) == root.0 { each } else { 0 };
        let sent = (0..n as u32).flat_map(|from| (0..n as u32).map(move |to| length(from, to))).collect();
        let one = |spans: &[Span], at: Rank| {
            let mut all = vec![NOTHING; n];
            all[at.index()] = spans[0];
            all
        };
        let all = |spans: &[Span]| if spans.is_empty() { vec![NOTHING; n] } else { spans.to_vec() };
        let (inputs, outputs) = (&self.call.inputs, &self.call.outputs);
        let (give, take) = if gathers { (one(inputs, root), all(outputs)) } else { (all(inputs), one(outputs, root)) };
        self.agree_inside()?;
        self.exchange(&Lengths { sent, n }, &give, &take)
    }

    /// all_to_all: every rank first tells all others what it sends and expects.
    pub(super) fn all_to_all(&self) -> Result<()> {
        self.agree_inside()?;
        let n = self.layout.size();
        let words = self.tell_all(self.call.inputs.iter().chain(&self.call.outputs).map(|span| span.bytes as u64).collect())?;
        let sent: Vec<usize> = words.chunks_exact(2 * n).flat_map(|row| row[..n].iter().map(|&bytes| bytes as usize)).collect();
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let (gives, takes) = (words[from * 2 * n + to], words[to * 2 * n + n + from]);
            if gives != takes {
                let [from, to] = [from, to].map(|rank| self.layout.describe(Rank(rank as u32)));
                let (group, sequence) = (self.inner.control().name(), self.sequence);
                return Err(Error::mismatch(format!(
                    "ranks of group \"{group}\" do not agree: {from} sends {gives} bytes to {to} in all_to_all #{sequence}, which expects \
                     {takes}"
                )));
            }
        }
        self.exchange(&Lengths { sent, n }, &self.call.inputs, &self.call.outputs)
    }

    /// The words of all ranks, in their order; all have as many.
    fn tell_all(&self, mut words: Vec<u64>) -> Result<Vec<u64>> {
        let (host, hosts, row) = (self.host(), self.layout.hosts(), words.len() * 8);
        let most = (0..hosts).map(|host| self.layout.members(host).len()).max().unwrap_or(0) * row;
        let between = self.agree_between(1, (hosts + 1) * most)?;
        let mut all = Scratch::new(hosts * most);
        let whole = all.span();
        let mine = part(whole, &(host * most..host * most + self.locals() * row));
        let own = Span { addr: words.as_mut_ptr().addr(), bytes: row };
        let rows = (0..self.locals()).map(|local| part(mine, &(local * row..(local + 1) * row))).collect();
        self.inside(vec![self.inner_bytes(Op::AllGather, vec![own], rows)])?;
        if let Some(between) = &between {
            let (from, to) = (between.begin, between.begin + most);
            copy(mine, between.staged(from, mine.bytes));
            between.run(&Transfer::AllGather { from, each: most, to })?;
            copy(between.staged(to, whole.bytes), whole);
        }
        let (inputs, outputs) = if self.local() == 0 { (vec![whole], vec![]) } else { (vec![], vec![whole]) };
        self.inside(vec![self.inner_bytes(Op::Broadcast, inputs, outputs)])?;
        let at = |rank: Rank| self.layout.host(rank) * most + self.layout.local(rank) * row;
        let rows = (0..self.layout.size() as u32).map(Rank).flat_map(|rank| all.bytes()[at(rank)..at(rank) + row].chunks_exact(8));
        Ok(rows.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// 1. Inside: what is for other hosts goes to its carriers. 2. Between: carriers exchange. 3. Inside: everything reaches its rank.
    ///
    /// Whatever has several parts has them in the order of senders, then of receivers.
    fn exchange(&self, lengths: &Lengths, give: &[Span], take: &[Span]) -> Result<()> {
        let (me, host, local, hosts) = (self.rank, self.host(), self.local(), self.layout.hosts());
        let (here, ranks) = (self.layout.members(host), || (0..lengths.n as u32).map(Rank));
        let away = |rank: Rank| self.layout.host(rank) != host;
        // Of the parts that some ranks send to others, those that local index `carrier` brings.
        let carried = |from: &[Rank], to: &[Rank], carrier: usize| -> Vec<(Rank, Rank)> {
            let pairs = from.iter().flat_map(|&from| to.iter().map(move |&to| (from, to)));
            pairs.filter(|&(from, to)| self.carrier(from, to) == carrier).collect()
        };
        let total = |pairs: &[(Rank, Rank)]| -> usize { pairs.iter().map(|&(from, to)| lengths.of(from, to)).sum() };
        let others: Vec<Rank> = ranks().filter(|&rank| away(rank)).collect();
        let to_host = |to: usize| if to == host { vec![] } else { carried(here, self.layout.members(to), local) };
        let from_host = |from: usize| if from == host { vec![] } else { carried(self.layout.members(from), here, local) };
        let [sent, received] = [&to_host as &dyn Fn(usize) -> Vec<(Rank, Rank)>, &from_host]
            .map(|pairs| (0..hosts).map(|host| total(&pairs(host))).collect::<Vec<usize>>());
        let (out, back): (usize, usize) = (sent.iter().sum(), received.iter().sum());
        let between = self.agree_between(self.layout.rails(), out + back)?;

        // To the carriers. What this rank gives each, and what it gets from each as a carrier.
        let mut outgoing = Scratch::new(others.iter().map(|&to| lengths.of(me, to)).sum());
        let mut cursor = Cursor(outgoing.span().addr);
        let inputs = (0..here.len()).map(|carrier| {
            let pairs = carried(&[me], &others, carrier);
            let whole = Span { addr: cursor.0, bytes: total(&pairs) };
            pairs.iter().for_each(|&(from, to)| copy(give[to.index()], cursor.next(lengths.of(from, to))));
            whole
        });
        let inputs: Vec<Span> = inputs.collect();
        let mut brought = Scratch::new(out);
        let mut cursor = Cursor(brought.span().addr);
        let outputs = here.iter().map(|&from| cursor.next(total(&carried(&[from], &others, local)))).collect();
        self.inside(vec![self.inner_bytes(Op::AllToAll, inputs, outputs)])?;

        // Between hosts. What was brought is sorted by sender alone, what is sent by host first.
        if let Some(between) = &between {
            let mut places: Vec<Cursor> = Vec::new();
            let mut at = Cursor(between.staged(between.begin, 0).addr);
            sent.iter().for_each(|&bytes| places.push(Cursor(at.next(bytes).addr)));
            let mut cursor = Cursor(brought.span().addr);
            for (from, to) in carried(here, &others, local) {
                let bytes = lengths.of(from, to);
                copy(cursor.next(bytes), places[self.layout.host(to)].next(bytes));
            }
            let (from, to) = (between.begin, between.begin + out);
            // All ranks of the rail know whether any of them sends.
            let busy = ranks().flat_map(|from| ranks().map(move |to| (from, to))).any(|(from, to)| {
                self.layout.host(from) != self.layout.host(to) && self.carrier(from, to) == local && lengths.of(from, to) > 0
            });
            if busy {
                between.run(&Transfer::AllToAll { from, sent: &sent, to, received: &received })?;
            }
        }

        // To the ranks: what came for them, then what this rank itself gives them.
        let came: Vec<(Rank, Rank)> = (0..hosts).flat_map(from_host).collect();
        let came = if between.is_some() { came } else { vec![] };
        let direct: usize = here.iter().map(|&to| lengths.of(me, to)).sum();
        let mut incoming = Scratch::new(back + direct);
        let mut cursor = Cursor(incoming.span().addr);
        let inputs = here.iter().map(|&receiver| {
            let begin = cursor.0;
            let mut at = Cursor(between.as_ref().map_or(0, |between| between.staged(between.begin + out, 0).addr));
            for &(from, to) in &came {
                let bytes = at.next(lengths.of(from, to));
                if to == receiver {
                    copy(bytes, cursor.next(bytes.bytes));
                }
            }
            copy(give[receiver.index()], cursor.next(lengths.of(me, receiver)));
            Span { addr: begin, bytes: cursor.0 - begin }
        });
        let inputs: Vec<Span> = inputs.collect();
        let mut arrived = Scratch::new(ranks().map(|from| lengths.of(from, me)).sum());
        let mut cursor = Cursor(arrived.span().addr);
        let outputs = here.iter().enumerate();
        let outputs = outputs.map(|(carrier, &giver)| cursor.next(total(&carried(&others, &[me], carrier)) + lengths.of(giver, me)));
        self.inside(vec![self.inner_bytes(Op::AllToAll, inputs, outputs.collect())])?;
        let mut cursor = Cursor(arrived.span().addr);
        for (carrier, &giver) in here.iter().enumerate() {
            // As the carrier has them: by host, then by sender.
            for from in (0..hosts).filter(|&from| from != host).flat_map(|from| carried(self.layout.members(from), &[me], carrier)) {
                copy(cursor.next(lengths.of(from.0, me)), take[from.0.index()]);
            }
            copy(cursor.next(lengths.of(giver, me)), take[giver.index()]);
        }
        Ok(())
    }
}
