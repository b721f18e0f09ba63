package jwt

import (
	"encoding/base64"
	"errors"
	"strings"

	"github.com/go-jose/go-jose/v4"

	"github.com/chancery-project/chancery/csr"
)

// algorithms are what a token may be signed with. Neither symmetric ones nor "none" are ever among them.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512,
	jose.ES256, jose.ES384, jose.ES512, jose.EdDSA,
}

// parsedToken is a token whose form is right. Nothing of it is verified.
type parsedToken struct {
	token   string
	kid     string
	alg     jose.SignatureAlgorithm
	jws     *jose.JSONWebSignature // nil if we do not know the algorithm
	payload []byte
}

// parseToken takes a compact JWS apart. It is strict about base64, so that a token has one form only.
func parseToken(token string) (*parsedToken, error) {
	malformed := func(why string) error {
		return refuse(csr.ReasonTokenMalformed, "the token is no compact JWS: %s", why)
	}
	parts := strings.SplitN(token, ".", 4)
	if len(parts) != 3 {
		return nil, malformed("it should have three parts, with dots between")
	}
	p := &parsedToken{token: token}
	for i, part := range parts {
		if strings.ContainsAny(part, "\r\n") { // which the decoder would skip
			return nil, malformed("a line break")
		}
		b, err := base64.RawURLEncoding.Strict().DecodeString(part)
		if err != nil {
			return nil, malformed("a part is not base64url")
		}
		if i == 1 {
			p.payload = b
		}
	}
	jws, err := jose.ParseSignedCompact(token, algorithms)
	if unknown := (*jose.ErrUnexpectedSignatureAlgorithm)(nil); errors.As(err, &unknown) {
		if p.alg = unknown.Got; p.alg == "" {
			return nil, malformed("no algorithm in its header")
		}
		if a := strings.ToUpper(string(p.alg)); a == "NONE" || strings.HasPrefix(a, "HS") {
			return nil, refuse(csr.ReasonTokenKey, "the token's algorithm %.40q is never accepted", p.alg)
		}
		return p, nil
	}
	if err != nil || len(jws.Signatures) != 1 {
		return nil, malformed("its header cannot be read") // the error may quote the header
	}
	h := jws.Signatures[0].Protected
	if _, ok := h.ExtraHeaders["crit"]; ok {
		return nil, malformed("its header has critical extensions")
	}
	p.jws, p.kid, p.alg = jws, h.KeyID, jose.SignatureAlgorithm(h.Algorithm)
	return p, nil
}
