// Package svid owns `chancery svid`: it fetches X.509-SVIDs from the SPIFFE Workload API of an agent, and prints them
// or writes them as files.
//
// Files are replaced as a set, so that no reader sees a key beside a certificate of another one. It refuses to touch
// files that it did not make, and prints private keys only as PEM, which one has to ask for.
package svid
