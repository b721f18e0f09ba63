// Package answers owns what answers have in common: chains in the forms of both APIs, rendered once for each issuer, and the roots as
// the bundle key signs them (decision D6), signed once for each bundle.
//
// It refuses to pass a signature off for one of another generation or another key: what is signed anew costs microseconds.
package answers
