// Package stages owns what a rotation of roots or issuers does next: its phases, the gate of each, and what an admin may change. All
// of it are functions of the document, the evidence and the time.
//
// It refuses to pass a gate without evidence or an override that names it, to make a tainted authority sign again, and to start a second
// rotation beside one. It makes no key, writes nothing and knows no clock: that is package rotate/staged.
package stages
