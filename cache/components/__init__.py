"""One component per kind of attention state: it owns the kind's pages in the tree and their ledger."""
