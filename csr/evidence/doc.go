// Package evidence owns what this server knows of its consumers: which bundle each trusts, and of which issuers it may hold certificates.
// From that it makes the sets that go into this replica's note (decision D2): who is behind what the document asks for, and who of those
// that others have as behind is not.
//
// Agents count by what they say, and each certificate that they were given since. Clients without our agent count by what they were
// answered: a call shows that the answer before it has arrived (decision D3). Nobody is forgotten before the last certificate ends that
// it may hold, and who did not fit is waited for without a name.
//
// It refuses to take silence for an acknowledgement (decision D1), and to let a certificate end later than others were told, as long
// as they can be told. Nothing in it waits for the store on the way of a request, but for a certificate of an unusual life.
package evidence
