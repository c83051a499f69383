//! How many tokens of each chunk are live, to convert between slots and chunks.
//!
//! A Fenwick tree with one leaf per row answers "how many live tokens come before this chunk" and "which chunk
//! holds the n-th live token" in time logarithmic in the number of rows. Pruning or resurrecting a chunk
//! changes one leaf.

/// Live tokens by row, summed in a Fenwick tree. Rows are only added and removed at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveIndex {
    /// `tree[i]` is the sum of the leaves `i + 1 − lowbit(i + 1) ..= i`.
    tree: Vec<u32>,
    total: u32,
}

fn lowbit(n: usize) -> usize {
    n & n.wrapping_neg()
}

impl LiveIndex {
    /// Builds the index from all leaves in one pass; none where the sum exceeds the number of slots.
    pub(crate) fn build(leaves: impl Iterator<Item = u32>) -> Option<Self> {
        let mut index = Self { tree: leaves.collect(), total: 0 };
        index.total = index.tree.iter().try_fold(0u32, |sum, &n| sum.checked_add(n))?;
        for i in 1..=index.tree.len() {
            let parent = i + lowbit(i);
            if parent <= index.tree.len() {
                index.tree[parent - 1] += index.tree[i - 1];
            }
        }
        Some(index)
    }

    pub(crate) fn total(&self) -> usize {
        self.total as usize
    }

    /// Adds a row without live tokens.
    pub(crate) fn push(&mut self) {
        let n = self.tree.len() + 1;
        let (mut sum, mut child) = (0, n - 1);
        while child > n - lowbit(n) {
            sum += self.tree[child - 1];
            child -= lowbit(child);
        }
        self.tree.push(sum);
    }

    /// Adds a row with `live` live tokens; none where the sum exceeds the number of slots.
    pub(crate) fn push_live(&mut self, live: u32) -> Option<()> {
        self.total = self.total.checked_add(live)?;
        self.push();
        if let Some(leaf) = self.tree.last_mut() {
            *leaf += live;
        }
        Some(())
    }

    /// Keeps only the first `len` rows. The others must have no live tokens.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.tree.truncate(len);
    }

    /// Adds `delta` to the live tokens of the row `leaf`.
    pub(crate) fn add(&mut self, leaf: usize, delta: i32) {
        self.total = self.total.wrapping_add_signed(delta);
        let mut i = leaf + 1;
        while i <= self.tree.len() {
            self.tree[i - 1] = self.tree[i - 1].wrapping_add_signed(delta);
            i += lowbit(i);
        }
    }

    /// How many live tokens come before the row `leaf`.
    pub(crate) fn live_before(&self, leaf: usize) -> usize {
        let (mut sum, mut i) = (0, leaf);
        while i > 0 {
            sum += self.tree[i - 1];
            i -= lowbit(i);
        }
        sum as usize
    }

    /// The row that holds the `n`-th live token, counted from 0, and how many live tokens come before that row.
    pub(crate) fn find_nth(&self, n: usize) -> Option<(usize, usize)> {
        if n >= self.total() {
            return None;
        }
        let (mut at, mut before) = (0, 0u32);
        let mut step = self.tree.len().next_power_of_two();
        while step > 0 {
            let next = at + step;
            if next <= self.tree.len() && before + self.tree[next - 1] <= n as u32 {
                at = next;
                before += self.tree[next - 1];
            }
            step /= 2;
        }
        Some((at, before as usize))
    }
}
