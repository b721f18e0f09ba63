// Package board owns what the replicas of one authority tell each other: each writes one note into the store, and reads those of
// all others. A note says what its replica has taken over of the authority document, what its own issuance log has, and which
// of the certificates in it are revoked.
//
// Notes are authenticated under the sealing key, and bound to trust domain and replica: who can write the store alone
// can take one away, or put an older one back, and no more. What was read once is kept though the note goes: a revoked
// certificate must not come back because a replica, or its note, is gone (decision D2).
//
// It refuses notes that it cannot authenticate or does not understand to the last byte, and to pass over a second process that
// writes under this replica's name.
package board
