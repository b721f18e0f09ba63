package naming

import (
	"strings"
	"testing"
)

func TestCheckService(t *testing.T) {
	for name, ok := range map[string]bool{
		"shop/cart": true, "shop/api.example.com": true, "shop/*.example.com": true, "a-1/_x": true, "1/2": true,
		"": false, "shop": false, "shop/": false, "/cart": false, "shop/cart/x": false, "Shop/cart": false, "shop/Cart": false, "shop/a..b": false, "shop/.": false,
		"shop/*": false, "shop/*.": false, "shop/a.*.b": false, "-a/b": false, "a/b-": false, "a b/c": false, "a/b\x00": false,
		strings.Repeat("a", 63) + "/x": true, strings.Repeat("a", 64) + "/x": false,
		"x/" + strings.Repeat("a.", 126) + "b": true, "x/" + strings.Repeat("a.", 127) + "b": false,
	} {
		if err := CheckService(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}
