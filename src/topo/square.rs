//! A value for each pair of devices.

use crate::error::{Error, Result};

/// A symmetric square matrix: `at(a, b) == at(b, a)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Square<T> {
    size: usize,
    cells: Vec<T>,
}

impl<T: Copy + PartialEq + std::fmt::Display> Square<T> {
    /// Makes a matrix of these rows; fails unless they are square and symmetric.
    pub fn new(rows: &[Vec<T>]) -> Result<Self> {
        let size = rows.len();
        for (row, cells) in rows.iter().enumerate() {
            if cells.len() != size {
                return Err(Error::value(format!(
                    "row {row} has {} entries, but there are {size} rows",
                    cells.len()
                )));
            }
        }
        for (a, row) in rows.iter().enumerate() {
            for (b, cell) in row.iter().enumerate().take(a) {
                if *cell != rows[b][a] {
                    return Err(Error::value(format!(
                        "[{b}][{a}] is {}, but [{a}][{b}] is {cell}",
                        rows[b][a]
                    )));
                }
            }
        }
        Ok(Self { size, cells: rows.concat() })
    }

    /// Makes a matrix with `cell(a, b)` at `[a][b]` and `[b][a]`; calls `cell` only for `a <= b`.
    pub fn from_pairs(size: usize, cell: impl Fn(usize, usize) -> T) -> Self {
        let places = (0..size).flat_map(|a| (0..size).map(move |b| (a.min(b), a.max(b))));
        Self { size, cells: places.map(|(a, b)| cell(a, b)).collect() }
    }

    /// Returns the number of rows.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the value of the pair `a` and `b`.
    ///
    /// # Panics
    /// If one of them is not below `size`.
    pub fn at(&self, a: usize, b: usize) -> T {
        assert!(a < self.size && b < self.size, "pair ({a}, {b}) of {} devices", self.size);
        self.cells[a * self.size + b]
    }

    /// Returns the rows, top to bottom.
    pub fn rows(&self) -> impl Iterator<Item = &[T]> {
        // `chunks` does not accept 0; an empty matrix yields no rows.
        self.cells.chunks(self.size.max(1))
    }

    /// Returns true if `holds` is true of every pair of different devices.
    pub fn every_pair(&self, holds: impl Fn(T) -> bool) -> bool {
        (0..self.size).all(|a| (0..a).all(|b| holds(self.at(a, b))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back() {
        let rows = [vec![1, 2, 3], vec![2, 4, 5], vec![3, 5, 6]];
        let square = Square::new(&rows).expect("symmetric");
        assert_eq!(square.rows().collect::<Vec<_>>(), rows);
        assert_eq!(Square::from_pairs(3, |a, b| rows[a][b]), square);
        assert!(square.every_pair(|cell| (2..=5).contains(&cell)));
        assert_eq!(Square::<u32>::new(&[]).expect("nothing").rows().count(), 0);
    }
}
